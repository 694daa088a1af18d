"""One sound file of every kind that this package reads, each with its reader.

`test_damaged_files` does damage to them, `tests/fuzz` breeds others from them.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.drivers.federation.administration import Administration
from lightsecagg.drivers.federation.checkpoints import load_best
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.dashboard.folder import FolderBoard
from lightsecagg.drivers.federation.dashboard.web import read_token
from lightsecagg.drivers.federation.jobs import VectorClient
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.membership import load_membership
from lightsecagg.drivers.federation.models import read_model
from lightsecagg.drivers.federation.provisioning import load_identity, provision
from lightsecagg.drivers.federation.register import load_register
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.drivers.flower.node import load_keys
from lightsecagg.drivers.transport.tls import Credentials
from lightsecagg.errors import ConfigurationError, JournalError
from lightsecagg.session.record import RoundRecord
from lightsecagg.training.datasets.cifar import read_batch
from lightsecagg.training.datasets.idx import read_idx
from lightsecagg.training.datasets.images import open_image
from lightsecagg.training.datasets.leaf import read_leaf
from lightsecagg.training.datasets.tables import read_csv, read_npz, read_writer_ids

Reader = tuple[Path, Callable[[], Any]]
"""A sound file, and what reads it."""


NOISE = bytes(np.random.default_rng(7).integers(0, 256, 4096, dtype=np.uint8))
RUBBISH = {
    "empty": b"",
    "binary": NOISE,
    "not UTF-8": b"\xff\xfe\xfd" * 100,
    "zeros": bytes(512),
    "arrays in arrays": b"[" * 5000,
    "a begun archive": b"PK\x03\x04" + NOISE,
    "a begun array": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'shape': (9999999999999,), }\n",
    "a begun certificate": b"-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n",
    "a begun key": b"-----BEGIN PRIVATE KEY-----\nMAo=\n-----END PRIVATE KEY-----\n",
    "a begun pickle": b"\x80\x02" + b"(" * 5000,
}


def refuses(reader: Reader, content: bytes) -> bool:
    """Whether the reader refuses this content in our own words; it may take it, but not fail."""
    path, read = reader
    sound = path.read_bytes()
    beside = [path.with_name(path.name + end) for end in ("-wal", "-shm")]
    path.write_bytes(content)
    said = None
    try:
        read()
    except (ConfigurationError, JournalError) as error:
        said = str(error)
    finally:
        path.write_bytes(sound)
        for other in beside:
            with suppress(FileNotFoundError):
                other.unlink()
    if said is None:
        return False
    # SQLite's file is named by the folder that holds it.
    assert re.search(f"{re.escape(path.name)}|{re.escape(str(path.parent))}", said)
    assert len(said) < 1000
    assert said.isprintable()
    return True


def sound_files(folder: Path) -> dict[str, Reader]:
    """All of them, below a folder."""
    return {**party_files(folder / "federation"), **data_files(folder / "data")}


def party_files(folder: Path) -> dict[str, Reader]:
    made = provision(folder, 4, privacy=1, dropouts=0, vectors=3)
    server, client = made.server, made.clients[0]
    own = client.parent
    authority, certificate, key = own / "ca.pem", own / "client.pem", own / "client.key"
    ledger, state = own / "ledger", folder / "state"

    def load_credentials() -> Credentials:
        credentials = Credentials.load(authority, certificate, key)
        credentials.check_client(0)
        return credentials

    def open_ledger() -> None:
        ClientLedger(ledger, made.session, 0).close()

    def open_journal() -> None:
        journal = Journal(state, made.session.hex())
        journal.next_round(), journal.unfinished(), journal.load_model()
        journal.close()

    def open_authority() -> None:
        Administration(made.directory).close()

    open_ledger()
    open_journal()
    allow_list = own / "allow-list.json"
    models, token, keys = state / "models", folder / "token", folder / "keys"
    (models / "best.json").write_text('{"rounds":1,"figure":"loss","value":0.25}')
    np.savez(models / "1.npz", model=np.ones(5, dtype=np.float32))
    rounds = state / "rounds.json"
    rounds.write_text(json.dumps([RoundRecord(1, "lightsecagg", [0, 1, 2], [0, 2]).to_json()]))
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    keys.write_text("".join(f"{made.authority_key.hex()}  # a node\n" for _ in range(2)))
    return {
        "server.toml": (server, lambda: load_config(ServerConfig, server)),
        "client.toml": (client, lambda: load_config(ClientConfig, client)),
        "allow-list": (allow_list, lambda: load_membership(allow_list, made.authority_key)),
        "register": (
            made.directory / "authority" / "members.json",
            lambda: load_register(made.directory / "authority"),
        ),
        "identity": (own / "identity.key", lambda: load_identity(own / "identity.key")),
        "authority": (authority, load_credentials),
        "certificate": (certificate, load_credentials),
        "key": (key, load_credentials),
        "ledger": (ledger, open_ledger),
        "journal": (state / "journal.sqlite", open_journal),
        "mark": (state / "journal.mark", open_journal),
        "authority key": (made.directory / "authority" / "ca.key", open_authority),
        "best": (models / "best.json", lambda: load_best(models)),
        "model": (models / "1.npz", lambda: read_model(state)),
        "rounds": (rounds, lambda: FolderBoard(state).look()),
        "token": (token, lambda: read_token(token)),
        "keys of nodes": (keys, lambda: load_keys(keys)),
    }


def data_files(folder: Path) -> dict[str, Reader]:
    for part in ("leaf/train", "leaf/test", "csv"):
        (folder / part).mkdir(parents=True)

    def put(name: str, content: bytes | str) -> Path:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    vector, vectors = folder / "vector.npy", folder / "vectors.npz"
    arrays, writers = folder / "data.npz", folder / "writers.npz"
    np.save(vector, np.ones(20))
    np.savez(vectors, vector=np.ones(20), samples=3)
    np.savez_compressed(arrays, x_train=np.ones((6, 3)), y_train=np.arange(6) % 2)
    np.savez(writers, train=np.arange(6))
    table = put("csv/train.csv", "a,b,label\n" + "1.5,2,0\n3,4.5,1\n" * 20)
    users = json.dumps({"user_data": {"u": {"x": [[0.5] * 9] * 4, "y": [0, 1, 0, 1]}}})
    leaf = put("leaf/train/all.json", users)
    put("leaf/test/all.json", users)
    header = bytes([0, 0, 8, 1]) + (50).to_bytes(4, "big")
    idx = put("labels-idx1", header + bytes(50))
    zipped = put("labels-idx1.gz", gzip.compress(header + bytes(range(50))))
    batch = {b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [1, 2]}
    cifar = put("data_batch_1", pickle.dumps(batch, protocol=2))
    image = folder / "image.png"
    from PIL import Image

    Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).save(image)
    return {
        "vector.npy": (vector, lambda: VectorClient(VectorsTable(input=vector))),
        "vectors.npz": (vectors, lambda: VectorClient(VectorsTable(input=vectors))),
        "data.npz": (arrays, lambda: read_npz(arrays, None)),
        "writers.npz": (writers, lambda: read_writer_ids(writers)),
        "train.csv": (table, lambda: read_csv(table.parent, None)),
        "leaf": (leaf, lambda: read_leaf(leaf.parent.parent, None)),
        "idx": (idx, lambda: read_idx(idx, 1)),
        "idx.gz": (zipped, lambda: read_idx(zipped, 1)),
        "cifar": (cifar, lambda: read_batch(cifar)),
        "image": (image, lambda: open_image(image)),
    }
