"""Flower beside Flower: plain averaging, Flower's own SecAgg+, and LightSecAgg.

    python benchmarks/flower deployment   seconds of a round, in real processes, TLS and node keys
    python benchmarks/flower links        the same beside our federation, over shaped links, as root
    python benchmarks/flower kills        the same processes, of which one is killed in every stage
    python benchmarks/flower grid         CPU seconds of a round, in one process
    python benchmarks/flower recovery     CPU seconds of the server's recovery, with dropouts

Needs `lightsecagg[flower]` and scikit-learn. The contestants take turns, so that what else the
machine does hits all of them; still, run it on an idle one. `--json` prints all that was measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from lightsecagg.errors import LightSecAggError
from lightsecagg_lab.experiments.processes import terminable

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/flower", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, nodes in (
        ("deployment", 4),
        ("links", [4]),
        ("kills", 4),
        ("grid", 10),
        ("recovery", 50),
    ):
        command = commands.add_parser(name)
        many = "+" if name == "links" else None
        command.add_argument("--nodes", type=int, nargs=many, default=nodes)
        command.add_argument("--json", action="store_true")
        if name == "links":
            command.add_argument("--rates", type=float, nargs="+", default=[98.0, 802.0])
            command.add_argument("--rounds", type=int, default=3, help="after the cold one")
            command.add_argument("--out", default="results", help="folder of the report and cells")
            command.add_argument("--only", nargs="*", help="of Flower's contestants")
            command.add_argument("--fedml", help="a Python with fedml: measure its LightSecAgg too")
            command.add_argument("--busy-anyway", action="store_true")
        if name == "kills":
            command.add_argument("--stages", nargs="*", help="in which a SuperNode is killed")
        if name in ("deployment", "grid"):
            command.add_argument("--repeat", type=int, default=3)
            command.add_argument("--rounds", type=int, default=2)
            command.add_argument("--only", nargs="*", help="of the contestants")
        if name in ("links", "grid", "recovery"):
            command.add_argument("--dim", type=int, default=1_206_590)
        if name == "recovery":
            command.add_argument("--dropouts", type=float, default=0.3)
    options = vars(parser.parse_args())
    command, as_json = options.pop("command"), options.pop("json")
    try:
        with terminable():
            document = measure(command, options)
    except LightSecAggError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if as_json:
        print(json.dumps({"command": command, **options, **document}, indent=1))
        return
    if command == "links":
        print((Path(options["out"]) / "peers-links.md").read_text("utf-8"))
        return
    for name, figures in document.items():
        print(f"{name}:", ", ".join(f"{key} {value}" for key, value in figures.items()))


def measure(command: str, options: dict[str, Any]) -> dict[str, Any]:
    if command == "deployment":
        import deployment as measured
    elif command == "links":
        import flower_links as measured
    elif command == "kills":
        import kills as measured
    elif command == "grid":
        import grid as measured
    else:
        import recovery as measured
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return measured.measure(**options, tell=lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
