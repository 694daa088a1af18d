"""What importing the package costs, that it needs no extra, and what no module may import."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightsecagg

SOURCE = Path(lightsecagg.__file__).parent
LABORATORY = Path(__file__).parents[1] / "lab" / "src" / "lightsecagg_lab"
EXTRAS = (
    "flwr",
    "google.protobuf",
    "grpc",
    "matplotlib",
    "PIL",
    "prometheus_client",
    "pydantic",
    "scipy",
    "sklearn",
    "torch",
)
COMMAND_LINE = ("click", "rich", "typer")
CORE = ("errors", "foreign", "params", "field", "crypto", "masks", "protocol", "session")


def modules(layer: str) -> list[str]:
    """The names of all modules of a layer, found as files."""
    root = SOURCE / layer
    files = sorted(root.rglob("*.py")) if root.is_dir() else [SOURCE / f"{layer}.py"]
    return [
        ".".join(("lightsecagg", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for file in files
    ]


def loaded_by(statements: str, unwanted: tuple[str, ...]) -> list[str]:
    """Which of the unwanted modules a fresh interpreter has loaded after the statements."""
    program = f"import sys\n{statements}\nprint(*[m for m in {unwanted!r} if m in sys.modules])"
    return run(program).splitlines()[-1].split()


def run(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_comparison_would_see_an_extra() -> None:
    assert loaded_by("import pydantic", EXTRAS) == ["pydantic"]


def test_importing_the_package_loads_no_extra_and_no_command_line() -> None:
    assert loaded_by("import lightsecagg", (*EXTRAS, *COMMAND_LINE)) == []


def test_all_modules_from_session_down_load_no_extra_and_no_command_line() -> None:
    names = [name for layer in CORE for name in modules(layer)]
    assert "lightsecagg.masks.one_shot_recovery" in names
    assert "lightsecagg.field" in names
    assert loaded_by(f"import {', '.join(names)}", (*EXTRAS, *COMMAND_LINE)) == []


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_command_line_starts_without_extras(argument: str) -> None:
    """As if none were installed: importing one fails."""
    program = f"""
import sys
for name in {EXTRAS!r}:
    sys.modules[name] = None
from lightsecagg.cli.main import main
sys.argv = ["lightsecagg", {argument!r}]
main()
"""
    assert "lightsecagg" in run(program)


# -- the contracts in pyproject.toml -------------------------------------------------------------

PURE = "no clock, thread, socket or framework in session, protocol and below"


def contracts(folder: Path, module: str, statement: str) -> str:
    """What the guard says of a copy of the package in which a module has one statement more."""
    for source in (SOURCE, LABORATORY):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCE.parent.parent / "pyproject.toml", folder)
    with (folder / "lightsecagg" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{statement}\n")
    # An editable install has put a finder in front that would lead to the sources themselves;
    # Python's own finders are classes.
    program = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
from importlinter.cli import lint_imports
print(lint_imports(no_cache=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("statement", "verdict"), [("", "KEPT"), ("import lightsecagg_lab.planning", "BROKEN")]
)
def test_the_guard_finds_the_laboratory_in_the_product(
    tmp_path: Path, statement: str, verdict: str
) -> None:
    found = contracts(tmp_path, "cli/run.py", statement)
    assert f"the product never imports the laboratory {verdict}" in found


@pytest.mark.parametrize(
    ("module", "statement", "verdict"),
    [
        ("protocol/wire.py", "", "KEPT"),
        ("protocol/wire.py", "import asyncio", "BROKEN"),
        ("protocol/schemes/coded_masks.py", "from time import monotonic", "BROKEN"),
        ("masks/mask_encoding.py", "import random", "BROKEN"),
        ("session/interface.py", "import asyncio", "BROKEN"),
        ("session/envelope.py", "from time import monotonic", "BROKEN"),
        ("drivers/local.py", "import asyncio", "KEPT"),
    ],
)
def test_the_guard_finds_clocks_and_loops_from_session_down(
    tmp_path: Path, module: str, statement: str, verdict: str
) -> None:
    assert f"{PURE} {verdict}" in contracts(tmp_path, module, statement)


def test_the_guard_finds_what_one_system_alone_has(tmp_path: Path) -> None:
    found = contracts(tmp_path, "drivers/federation/durable.py", "import fcntl")
    assert "what one system alone has is asked for in system.py BROKEN" in found


# -- S21: nothing that can run code is ever used to read data ------------------------------------

EXECUTING_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
EXECUTING_CALLS = {"eval", "exec", "torch.load"}
# Opens a published data set from a local file with an unpickler that resolves no name.
EXCEPTIONS = {("training/datasets/cifar.py", "pickle")}


def executing_uses(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & EXECUTING_MODULES
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module.split(".")[0]} & EXECUTING_MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in EXECUTING_CALLS:
                found.add(name)
            # NumPy refuses pickled objects unless it is told otherwise.
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                    found.add("allow_pickle")
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", {"pickle"}),
        ("from yaml import load", {"yaml"}),
        ("x = eval('1')", {"eval"}),
        ("torch.load(f)", {"torch.load"}),
        ("np.load(f)", set()),
        ("np.load(f, allow_pickle=True)", {"allow_pickle"}),
        ("np.load(f, allow_pickle=trusted)", {"allow_pickle"}),
        ("np.load(f, allow_pickle=False)", set()),
        ("model.eval()", set()),
        ("json.load(f)", set()),
    ],
)
def test_S21_the_static_ban_sees_what_it_bans(source: str, found: set[str]) -> None:
    assert executing_uses(source) == found


def test_S21_nothing_that_runs_code_reads_data() -> None:
    uses = {
        (file.relative_to(source).as_posix(), use)
        for source in (SOURCE, LABORATORY)
        for file in source.rglob("*.py")
        for use in executing_uses(file.read_text("utf-8"))
    }
    assert uses <= EXCEPTIONS


# -- S28: decoders are made at import, where only one thread is -----------------------------------


def decoders_made_late(source: str) -> set[str]:
    """Calls inside functions that make msgspec examine a type."""
    found = set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, functions):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                typed = any(keyword.arg == "type" for keyword in node.keywords)
                late = name.endswith(".Decoder") or (name.endswith(".decode") and typed)
                if name.startswith("msgspec.") and (late or name == "msgspec.convert"):
                    found.add(name)
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("d = msgspec.msgpack.Decoder(T)", set()),
        ("def f(): return msgspec.msgpack.Decoder(T)", {"msgspec.msgpack.Decoder"}),
        ("def f(x): return msgspec.json.decode(x, type=T)", {"msgspec.json.decode"}),
        ("class C:\n  def f(s, x): return msgspec.convert(x, T)", {"msgspec.convert"}),
        ("def f(x): return msgspec.json.decode(x)", set()),
        ("def f(x): return d.decode(x)", set()),
    ],
)
def test_S28_late_decoders_are_seen(source: str, found: set[str]) -> None:
    assert decoders_made_late(source) == found


def test_S28_no_decoder_is_made_where_threads_may_be() -> None:
    """Two threads in which msgspec examines the same type for the first time crash the process."""
    late = {
        str(path.relative_to(source)): found
        for source in (SOURCE, LABORATORY)
        for path in source.rglob("*.py")
        if (found := decoders_made_late(path.read_text(encoding="utf-8")))
    }
    assert late == {}


# -- protocols are asked what they are, not what they are called ----------------------------------


def names_asked_for(source: str) -> list[str]:
    """Comparisons with a protocol's name, and tables that are keyed by one."""
    found = []
    ours = re.search(r"schemes\.traits import .*LIGHTSECAGG", source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            parts: list[ast.expr | None] = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        else:
            continue
        text = " ".join(ast.unparse(part) for part in parts if part is not None)
        if "ProtocolName." in text or (ours and "LIGHTSECAGG" in text):
            found.append(text)
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if p is ProtocolName.PLAIN: pass", 1),
        ("x = p in (ProtocolName.SECAGG, ProtocolName.SECAGG_PLUS)", 1),
        ("x = {ProtocolName.PLAIN: 1}[p]", 1),
        ("match p:\n  case ProtocolName.PLAIN: pass", 1),
        ("from schemes.traits import LIGHTSECAGG\nx = p == LIGHTSECAGG", 1),
        ("def f(p=ProtocolName.LIGHTSECAGG): return run(ProtocolName.SECAGG)", 0),
    ],
)
def test_questions_for_a_name_are_seen(source: str, found: int) -> None:
    assert len(names_asked_for(source)) == found


def test_nobody_outside_the_protocol_layer_asks_for_the_name_of_a_protocol() -> None:
    """A scheme from elsewhere would be missing there; `Traits` know all of them."""
    asked = {
        str(path.relative_to(source)): found
        for source in (SOURCE, LABORATORY)
        for path in source.rglob("*.py")
        if not {"protocol", "schemes"} & {*path.relative_to(source).parts}
        and (found := names_asked_for(path.read_text("utf-8")))
    }
    assert asked == {}
