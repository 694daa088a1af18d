"""Read the data set that a task names; nothing is ever downloaded."""

from __future__ import annotations

from lightsecagg.errors import ParameterError
from lightsecagg.training.config import TaskConfig
from lightsecagg.training.datasets.cifar import read_cifar10
from lightsecagg.training.datasets.dataset import Dataset
from lightsecagg.training.datasets.digits import read_digits
from lightsecagg.training.datasets.idx import read_fashion_mnist, read_mnist
from lightsecagg.training.datasets.images import read_image_folder
from lightsecagg.training.datasets.leaf import read_leaf
from lightsecagg.training.datasets.tables import read_csv, read_npz, read_writer_ids

# name -> what `lightsecagg task list` says of it
DATASETS = {
    "digits": "1,797 images of 8x8 from scikit-learn; needs no file",
    "mnist": "28x28 digits from the four idx files",
    "fashion-mnist": "28x28 clothing from the four idx files",
    "cifar10": "32x32 RGB from the Python pickles, or one PNG per batch",
    "femnist": "LEAF's JSON files, by user",
    "folder": "train/<class>/<image>, resized to --image-size",
    "npz": "your arrays x_train, y_train, x_test, y_test, users",
    "csv": "your train.csv and test.csv with a column label",
}


def read_dataset(config: TaskConfig) -> Dataset:
    """The data set of a built-in task, with its writers if the user has named them."""
    data_dir = config.data_dir
    match config.task:
        case "digits":
            dataset = read_digits()
        case "mnist":
            dataset = read_mnist(data_dir)
        case "fashion-mnist":
            dataset = read_fashion_mnist(data_dir)
        case "cifar10":
            dataset = read_cifar10(data_dir)
        case "femnist":
            dataset = read_leaf(data_dir, config.classes)
        case "folder":
            dataset = read_image_folder(data_dir, config.image_size)
        case "npz":
            dataset = read_npz(data_dir, config.classes, server_too=config.partition == "local")
        case "csv":
            dataset = read_csv(data_dir, config.classes, server_too=config.partition == "local")
        case unknown:
            raise ParameterError(f"there is no data set {unknown!r}; see {', '.join(DATASETS)}")
    if config.writer_ids is None:
        return dataset
    return dataset.with_groups(read_writer_ids(config.writer_ids))


__all__ = ["DATASETS", "Dataset", "read_dataset"]
