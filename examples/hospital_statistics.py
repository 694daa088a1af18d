"""Statistics of five hospitals' tables, from a federation: plan, vectors, one round, result.

python examples/hospital_statistics.py

Here every party runs on this machine. In earnest each works in its own folder on its own machine,
and what a hospital does is marked as such.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from lightsecagg import StatisticsPlan
from lightsecagg.drivers.federation.provisioning import free_port
from lightsecagg.statistics import BOUND

LIGHTSECAGG = [sys.executable, "-m", "lightsecagg"]

# All agree on the plan before anybody looks at data. It is public: hand it out as JSON.
plan = StatisticsPlan(
    ranges={"age": (0, 120)},
    categories={"sex": ["f", "m"], "smokes": ["no", "yes"]},
    tables=[("sex", "smokes")],
)
document = json.dumps(plan.to_dict())


def hospital_writes_its_table(path: Path) -> None:
    rng = np.random.default_rng()
    rows = zip(
        rng.integers(18, 95, 60),
        rng.choice(["f", "m"], 60),
        rng.choice(["no", "yes"], 60),
        strict=True,
    )
    path.write_text("\n".join(["age,sex,smokes", *(",".join(map(str, row)) for row in rows)]))


with tempfile.TemporaryDirectory() as temporary:
    fed = Path(temporary) / "fed"
    shape = ["--clients", "5", "--privacy", "1", "--dropouts", "1", "--port", str(free_port())]
    vectors = ["--vectors", str(plan.dimension), "--bound", str(BOUND)]
    provision = [*LIGHTSECAGG, "provision", "--out", str(fed), *shape, *vectors]
    subprocess.run(provision, check=True, stdout=subprocess.DEVNULL)

    for client in range(5):  # each hospital, with its own table
        folder = fed / "clients" / str(client)
        hospital_writes_its_table(folder / "table.csv")
        its_plan = StatisticsPlan(**json.loads(document))
        np.save(folder / "vector.npy", its_plan.encode(folder / "table.csv"))

    programs = [["server", "--config", str(fed / "server" / "server.toml")]]
    for client in range(5):
        path = fed / "clients" / str(client) / f"client-{client}.toml"
        programs.append(["client", "--config", str(path)])
    processes = [subprocess.Popen([*LIGHTSECAGG, *program, "--quiet"]) for program in programs]
    try:
        if any(process.wait(timeout=300) for process in processes):
            raise SystemExit("the federation failed")
    finally:
        for process in processes:
            process.kill()

    # The server, which never saw a single table.
    result = plan.decode(np.load(fed / "server" / "result.npz")["result"])
    (record,) = json.loads((fed / "server" / "state" / "rounds.json").read_text())
    whole = [plan.encode(fed / "clients" / str(c) / "table.csv") for c in record["included"]]

age = result.numbers["age"]
print(f"{result.clients} hospitals, {result.rows} patients")
print(f"age: mean {age.mean}, standard deviation {age.std}, median {age.quantiles[0.5]}")
print(f"sex by smoking: {result.tables[0].counts}")
print(f"equal to the same in the clear: {result == plan.decode(np.sum(whole, axis=0))}")
