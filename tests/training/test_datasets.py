from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.training import TaskConfig, initial_model, load_task, local_update
from lightsecagg.training.datasets import DATASETS, Dataset, read_dataset
from lightsecagg.training.datasets.cifar import read_batch

RNG = np.random.default_rng(0)


def read(task: str, data_dir: Path | None = None, **settings: Any) -> Dataset:
    return read_dataset(TaskConfig(task, data_dir=data_dir, **settings))


def all_rows(part: Any, n: int) -> Any:
    return part(np.arange(n, dtype=np.int64))


# --- digits -------------------------------------------------------------------------------------


def test_digits_need_no_file() -> None:
    digits = read("digits")
    assert (len(digits.train_targets), len(digits.test_targets)) == (1437, 360)
    assert digits.shape == (1, 8, 8)
    inputs, targets = all_rows(digits.train, 1437)
    assert (inputs.min(), inputs.max()) == (0.0, 1.0)
    assert set(targets.tolist()) == set(range(10))


# --- MNIST and Fashion-MNIST --------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write_mnist(folder: Path, *, zipped: bool = False) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train-images-idx3-ubyte": RNG.integers(0, 256, (30, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": (np.arange(30) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": RNG.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": np.arange(10, dtype=np.uint8),
    }
    for name, array in arrays.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("task", "inside", "mean", "std"),
    [
        ("mnist", "", 0.1307, 0.3081),
        ("mnist", "MNIST/raw", 0.1307, 0.3081),
        ("fashion-mnist", "FashionMNIST/raw", 0.2860, 0.3530),
    ],
)
def test_idx_files_are_read_from_the_usual_folders(
    tmp_path: Path, task: str, inside: str, mean: float, std: float, zipped: bool
) -> None:
    arrays = write_mnist(tmp_path / inside, zipped=zipped)
    data = read(task, tmp_path)
    inputs, targets = all_rows(data.train, 30)
    pixels = arrays["train-images-idx3-ubyte"][:, None]
    assert inputs == pytest.approx((pixels / 255 - mean) / std, abs=1e-5)
    assert inputs.dtype == np.float32
    assert np.array_equal(targets, arrays["train-labels-idx1-ubyte"])
    assert np.array_equal(data.test_targets, np.arange(10))


def test_a_mapped_mnist_trains(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    task = load_task(TaskConfig("mnist", clients=3, data_dir=tmp_path, model="logistic"))
    update = local_update(task, 0, initial_model(task))
    assert (update.delta.shape, update.samples) == ((7850,), 10)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"x",
        lambda raw: raw[:3],
        lambda raw: raw[:16],
        lambda raw: b"\x00\x00\x0d\x03" + raw[4:],
        lambda raw: b"",
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_broken_idx_files_are_named(tmp_path: Path, spoil: Any, zipped: bool) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    raw = spoil(path.read_bytes())
    if zipped:
        path.unlink()
        path = tmp_path / f"{path.name}.gz"
        raw = gzip.compress(raw)
    path.write_bytes(raw)
    with pytest.raises(ConfigurationError, match=path.name):
        read("mnist", tmp_path)


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path, zipped=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigurationError, match=r"t10k-images.*not a complete gzip file"):
        read("mnist", tmp_path)


# --- CIFAR-10 -----------------------------------------------------------------------------------

BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A CIFAR batch as the original Python 2 wrote it: byte strings, numpy.core, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n("
    array += number(0) + b"t" + text(b"b") + b"tR("
    array += number(1) + b"(" + number(len(pixels)) + number(3072) + b"t" + dtype + b"I00\n"
    array += text(pixels.tobytes()) + b"tb"
    body = b"}(" + text(b"data") + array
    body += text(b"labels") + b"](" + b"".join(number(label) for label in labels) + b"eu"
    return b"\x80\x02" + body + b"."


def python3_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({"data": pixels, "labels": labels}, protocol=2)


@pytest.mark.parametrize("write", [python2_pickle, python3_pickle])
@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar_pickles_are_read(tmp_path: Path, write: Any, inside: str) -> None:
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    pixels = RNG.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    for k, name in enumerate(BATCHES):
        (folder / name).write_bytes(write(pixels[k], [k, 1, 2, 9]))
    data = read("cifar10", tmp_path)
    assert (data.shape, data.classes) == ((3, 32, 32), 10)
    assert np.array_equal(data.train_inputs[np.array([5])], pixels[1, 1].reshape(1, 3, 32, 32))
    assert data.train_targets.tolist()[:8] == [0, 1, 2, 9, 1, 1, 2, 9]
    assert data.test_targets.tolist() == [5, 1, 2, 9]


def test_cifar_pngs_are_read(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (6, 4, 32, 32, 3), dtype=np.uint8)
    for k, name in enumerate(BATCHES):
        Image.fromarray(pixels[k].reshape(4, 1024, 3)).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text(json.dumps([3] * 20))
    (tmp_path / "test_labels.json").write_text(json.dumps([4] * 4))
    data = read("cifar10", tmp_path)
    image = data.train_inputs[np.array([7])][0]
    assert np.array_equal(image.transpose(1, 2, 0), pixels[1, 3])
    assert data.test_targets.tolist() == [4] * 4
    (tmp_path / "test_labels.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"test_labels.json is not a JSON list"):
        read("cifar10", tmp_path)
    Image.fromarray(np.zeros((4, 8, 3), dtype=np.uint8)).save(tmp_path / "data_batch_2.png")
    with pytest.raises(ConfigurationError, match=r"data_batch_2.png must have one image"):
        read("cifar10", tmp_path)


class Bomb:
    """Unpickled in earnest, this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_S21_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    path, trace = tmp_path / "data_batch_1", tmp_path / "owned"
    path.write_bytes(pickle.dumps({"data": Bomb(trace), "labels": [0]}, protocol=protocol))
    with pytest.raises(ConfigurationError, match=r"asks for \w+\.system"):
        read_batch(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins\neval",
        "numpy\nload",
        "numpy.core.multiarray\nfromfile",
        "lightsecagg.training.datasets.cifar\npickle",
        "_codecs\ndecode",
    ],
)
def test_S21_no_other_name_is_resolved(tmp_path: Path, name: str) -> None:
    path = tmp_path / "batch"
    path.write_bytes(f"c{name}\n.".encode())
    with pytest.raises(ConfigurationError, match="asks for"):
        read_batch(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": b"raw", "labels": [1]}),
        pickle.dumps({"labels": [1]}),
        pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, protocol=2),
        pickle.dumps({"data": np.zeros((1, 7), np.uint8), "labels": [1]}, protocol=2),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["cat"]}, protocol=2),
        python2_pickle(np.zeros((1, 3072), np.uint8), [0])[:-40],
    ],
)
def test_files_that_are_no_cifar_batch_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="data_batch_1"):
        read_batch(path)


@given(data=st.data())
@settings(max_examples=200)
def test_S21_a_damaged_batch_either_parses_or_raises_our_error(data: st.DataObject) -> None:
    raw = bytearray(python2_pickle(np.zeros((1, 3072), np.uint8), [0]))
    structure = [place for place, byte in enumerate(raw) if byte]
    for place in data.draw(st.lists(st.sampled_from(structure), min_size=1, max_size=3)):
        raw[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch"
        path.write_bytes(raw)
        with contextlib.suppress(ConfigurationError):
            images, _ = read_batch(path)
            assert images.shape[1:] == (3, 32, 32)


# --- LEAF ---------------------------------------------------------------------------------------


def write_leaf(folder: Path, users: dict[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (user, rows) in enumerate(users.items()):
        examples = {"x": [[0.5] * 784] * rows, "y": [number] * rows}
        document = {"users": [user], "num_samples": [rows], "user_data": {user: examples}}
        (folder / f"part_{number}.json").write_text(json.dumps(document))


def test_leaf_users_are_the_natural_partition(tmp_path: Path) -> None:
    write_leaf(tmp_path / "train", {"f0001": 3, "f0002": 4, "f0000": 2, "empty": 0})
    write_leaf(tmp_path / "test", {"f0001": 2})
    config = TaskConfig("femnist", clients=3, data_dir=tmp_path, partition="natural")
    task: Any = load_task(config)
    assert (task.dataset.shape, task.dataset.classes) == ((1, 28, 28), 62)
    assert sorted(len(task.client_data(client)) for client in range(3)) == [2, 3, 4]
    for client in range(3):
        assert len(set(task.client_data(client).targets.tolist())) == 1


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"users": []}', '{"user_data": {"a": {"x": [[1]], "y": [1, 2]}}}']
)
def test_broken_leaf_files_are_named(tmp_path: Path, content: str) -> None:
    write_leaf(tmp_path / "train", {"a": 2})
    write_leaf(tmp_path / "test", {"a": 2})
    (tmp_path / "train" / "broken.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"broken.json is not a LEAF file"):
        read("femnist", tmp_path)


# --- image folders ------------------------------------------------------------------------------


def write_images(root: Path) -> None:
    for part, count in (("train", 3), ("test", 1)):
        for shade, name in ((250, "cats"), (10, "dogs")):
            (root / part / name).mkdir(parents=True)
            for k in range(count):
                image = Image.new("L" if k else "RGBA", (20, 14), shade if k else (shade,) * 4)
                image.save(root / part / name / f"{k}.png")
            (root / part / name / "notes.txt").write_text("not an image")


def test_image_folders_are_resized_and_labelled_in_sorted_order(tmp_path: Path) -> None:
    write_images(tmp_path)
    data = read("folder", tmp_path, image_size=8)
    assert (data.shape, data.classes) == ((3, 8, 8), 2)
    assert data.train_targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_targets.tolist() == [0, 1]
    chosen = data.train_inputs[np.array([4, 1])]
    assert chosen[0].max() == 10
    assert chosen[1].min() == 250


def test_image_folder_mistakes_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"train is missing"):
        read("folder", tmp_path, image_size=8)
    write_images(tmp_path)
    with pytest.raises(ConfigurationError, match="--image-size"):
        read("folder", tmp_path)
    (tmp_path / "test" / "birds").mkdir()
    with pytest.raises(ConfigurationError, match="birds is a class that the train folder"):
        read("folder", tmp_path, image_size=8)
    (tmp_path / "test" / "birds").rmdir()
    (tmp_path / "train" / "cats" / "0.png").write_bytes(b"nonsense")
    data = read("folder", tmp_path, image_size=8)
    with pytest.raises(ConfigurationError, match=r"0.png is not an image"):
        data.train(np.array([0]))


# --- the user's own npz and CSV -----------------------------------------------------------------


def write_npz(path: Path, **changes: Any) -> None:
    arrays: dict[str, Any] = {
        "x_train": RNG.normal(size=(12, 5)),
        "y_train": np.arange(12) % 3,
        "x_test": RNG.normal(size=(4, 5)),
        "y_test": np.arange(4) % 3,
        "users": np.arange(12) // 4,
    }
    arrays |= changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


def test_npz_from_a_folder_or_a_file(tmp_path: Path) -> None:
    write_npz(tmp_path / "data.npz")
    for where in (tmp_path, tmp_path / "data.npz"):
        data = read("npz", where)
        assert (data.shape, data.classes) == ((5,), 3)
        assert data.train_inputs[np.arange(2)].dtype == np.float32
        assert data.groups is not None
        assert data.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_npz_bytes_are_images_in_the_unit_interval(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (12, 6, 6), dtype=np.uint8)
    write_npz(tmp_path / "data.npz", x_train=images, x_test=None, y_test=None)
    data = read("npz", tmp_path)
    inputs, _ = all_rows(data.train, 12)
    assert inputs == pytest.approx(images[:, None] / 255, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": None}, "no array 'y_train'"),
        ({"y_train": np.arange(11)}, "12 training examples but 11 labels"),
        ({"y_train": np.arange(12) - 1}, "label -1 of training example 0 is outside"),
        ({"y_train": np.linspace(0, 1, 12)}, "whole numbers"),
        ({"x_train": np.arange(12.0)}, "one row per example"),
        ({"x_train": np.array([["a"]] * 12)}, "must hold numbers"),
        ({"x_test": np.zeros((4, 6))}, "test examples"),
        ({"users": np.arange(3)}, "3 writer ids for 12"),
        ({"x_train": np.zeros((0, 5)), "y_train": np.zeros(0, int), "users": None}, "no training"),
        ({"x_train": np.array([[object()]] * 12)}, "not an npz file of plain arrays"),
    ],
)
def test_npz_mistakes_are_explained(tmp_path: Path, changes: Any, message: str) -> None:
    write_npz(tmp_path / "data.npz", **changes)
    with pytest.raises(ConfigurationError, match=message):
        read("npz", tmp_path)


def test_nan_in_the_data_is_refused(tmp_path: Path) -> None:
    write_npz(tmp_path / "data.npz", x_train=np.full((12, 5), np.nan))
    task = load_task(TaskConfig("npz", clients=2, data_dir=tmp_path))
    with pytest.raises(ConfigurationError, match="NaN or infinity"):
        task.client_data(0)


CSV = "age,label,user,dose\n1.5,0,7,2\n2.5,1,7,3\n3.5,1,8,4\n4.5,0,8,5\n"


def test_csv_columns_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("\ufeff" + CSV, encoding="utf-8")
    (tmp_path / "test.csv").write_text("age,dose,label\n1,2,1\n")
    data = read("csv", tmp_path)
    inputs, targets = all_rows(data.train, 4)
    assert inputs.tolist() == [[1.5, 2.0], [2.5, 3.0], [3.5, 4.0], [4.5, 5.0]]
    assert targets.tolist() == [0, 1, 1, 0]
    assert data.groups is not None
    assert data.groups.tolist() == [7, 7, 8, 8]
    assert len(data.test_targets) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line"),
        ("age,dose\n1,2\n", "one of them 'label'"),
        ("age,age,label\n1,2,0\n", "each column once"),
        ("label\n0\n", "no feature column"),
        ("age,label\n1,0\n2\n", "line 3 of .*train.csv has 1 values for 2 columns"),
        ("age,label\n1,0\nsecret,1\n", "column 'age' in line 3"),
        ("age,label\n1,0.5\n", "'label' .* whole numbers"),
        ("age,label\n1,inf\n", "'label' .* whole numbers"),
        ("age,label\n", "no training example"),
    ],
)
def test_csv_mistakes_are_explained_without_quoting_the_data(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read("csv", tmp_path)
    assert "secret" not in str(caught.value)


def test_csv_test_columns_must_match(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(CSV)
    (tmp_path / "test.csv").write_text("dose,age,label\n1,2,1\n")
    with pytest.raises(ConfigurationError, match="differ in columns"):
        read("csv", tmp_path)


# --- what all of them share ---------------------------------------------------------------------


@pytest.mark.parametrize("task", [name for name in DATASETS if name != "digits"])
def test_a_missing_file_says_what_to_put_where(tmp_path: Path, task: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{task} needs --data-dir: a folder with"):
        read(task, image_size=8)
    with pytest.raises(ConfigurationError, match="nowhere does not exist; it must hold"):
        read(task, tmp_path / "nowhere", image_size=8)
    with pytest.raises(ConfigurationError, match=f"{task}: .*(put|must hold) .*"):
        read(task, tmp_path, image_size=8)


def test_writer_ids_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "writers.npz"
    np.savez(path, train=np.arange(1437) // 100)
    config = TaskConfig("digits", clients=15, partition="natural", writer_ids=path)
    task: Any = load_task(config)
    assert sorted(len(task.client_data(client)) for client in range(15)) == [37] + [100] * 14
    np.savez(path, train=np.arange(3))
    with pytest.raises(ConfigurationError, match="3 writer ids for 1437"):
        read_dataset(config)
    np.savez(path, other=np.arange(3))
    with pytest.raises(ConfigurationError, match="no array 'train'"):
        read_dataset(config)
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"writers.npz does not exist"):
        read_dataset(config)


def test_natural_without_writers_is_refused() -> None:
    task: Any = load_task(TaskConfig("digits", partition="natural"))
    with pytest.raises(ConfigurationError, match="--writer-ids"):
        task.client_data(0)


def test_local_means_that_all_data_is_this_clients_own(tmp_path: Path) -> None:
    write_npz(tmp_path / "data.npz")
    settings: dict[str, Any] = {"clients": 50, "data_dir": tmp_path, "partition": "local"}
    task: Any = load_task(TaskConfig("npz", classes=7, **settings))
    assert len(task.client_data(49)) == 12
    assert task.model().layers[-1].out_features == 7
    with pytest.raises(ConfigurationError, match="set classes"):
        load_task(TaskConfig("npz", **settings)).client_data(0)


@pytest.mark.parametrize("name", ["csv", "npz"])
def test_with_local_data_the_server_needs_none_to_train_on(tmp_path: Path, name: str) -> None:
    if name == "csv":
        (tmp_path / "test.csv").write_text("a,label,b\n1,0,2\n3,1,4\n")
    else:
        np.savez(tmp_path / "data.npz", x_test=np.zeros((2, 2), np.float32), y_test=[0, 1])
    settings: dict[str, Any] = {"data_dir": tmp_path, "classes": 3}
    task: Any = load_task(TaskConfig(name, partition="local", **settings))
    model = task.model()
    assert (model.layers[0].in_features, model.layers[-1].out_features) == (2, 3)
    assert len(task.test_data()) == 2
    with pytest.raises(ConfigurationError, match=r"client 0 has 0 example"):
        local_update(task, 0, initial_model(task))
    with pytest.raises(ConfigurationError, match="train"):
        load_task(TaskConfig(name, **settings)).model()


def test_samples_per_client_is_a_limit() -> None:
    task: Any = load_task(TaskConfig("digits", clients=4, samples_per_client=11))
    assert [len(task.client_data(client)) for client in range(4)] == [11] * 4


@pytest.mark.parametrize(
    "bad",
    [
        {"clients": 0},
        {"partition": "random"},
        {"dirichlet_alpha": 0.0},
        {"dirichlet_alpha": float("nan")},
        {"shards_per_client": 0},
        {"seed": -1},
        {"classes": 1},
        {"image_size": 4},
        {"samples_per_client": 0},
        {"writer_ids": Path("writers.npz")},
    ],
)
def test_bad_task_configurations_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        TaskConfig(**bad)
