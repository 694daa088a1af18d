"""Whatever is wrong with a command, it says so in one paragraph: what, the limit, the remedy."""

from __future__ import annotations

import pytest

from lightsecagg.cli.main import app
from lightsecagg.cli.output import exit_codes

SIMULATE = "simulate --clients 5 --privacy 1 --dropouts 1"
VALUES = {
    "simulate --clients 3 --privacy 5 --dropouts 2 --dim 10": "lower privacy (T) or dropouts (D)",
    f"{SIMULATE} --dim -1": "dimension d = -1 must be at least 1",
    f"{SIMULATE} --dim 10 --drop upload=9": "9 clients should drop, but there are only 5",
    f"{SIMULATE} --dim 10 --buffer 3": "--buffer belongs to the asynchronous mode",
    f"{SIMULATE} --mode async --dim 10 --buffer 9": "--buffer K = 9 must be at most N = 5",
    f"{SIMULATE} --mode async --dim 9 --buffer 3 --task digits": "give either --dim",
    "plan --clients 10 --dim 100 --privacy 2 --dropouts 2 --liars 5": "lower E, T or D",
    "plan --clients 3 --dim 10 --privacy 9": "lower privacy (T) or dropouts (D)",
    "bench kernels --clients -1": "the case needs 0 <= T < U <= N",
}
FLAGS = {
    "simulate --protocol nosuch": "protocol 'nosuch' is unknown",
    "simulate --clients many": "is not a valid",
    "experiments nosuch": "No such command",
    "bench soak --clients 0": "0 is not in the range",
}


def tell(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Stderr of a command that is refused; nothing is ever written to stdout."""
    with pytest.raises(SystemExit) as end, exit_codes():
        app(command.split())
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("command", VALUES)
def test_what_is_wrong_is_said_in_one_paragraph(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = tell(command, capsys)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert VALUES[command] in err


@pytest.mark.parametrize("command", FLAGS)
def test_a_wrong_flag_is_named_with_the_way_to_the_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = tell(command, capsys)
    assert "Usage: " in err
    assert FLAGS[command] in err
