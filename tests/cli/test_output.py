"""Exit codes and streams: what a script that calls `lightsecagg` can rely on."""

from __future__ import annotations

import json
import logging

import pytest

from lightsecagg import errors
from lightsecagg.cli.output import exit_codes, last_line_of_log, print_json, warn


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ParameterError("U <= T"), 2),
        (errors.ConfigurationError("no such file"), 2),
        (errors.InputRefused("entry 3 is NaN"), 2),
        (errors.Aborted("too few clients"), 3),
        (errors.NotEnoughAnswers("4 of 5"), 3),
        (errors.InconsistentAnswers("somebody lied"), 3),
        (errors.CryptoError("bad signature"), 1),
        (errors.RemoteProtocolError("unexpected roster"), 1),
    ],
)
def test_errors_become_one_line_and_the_documented_code(
    error: errors.LightSecAggError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, exit_codes():
        raise error
    assert end.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {error}\n"


def test_the_error_that_ends_a_program_is_a_line_of_its_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal both are for people; elsewhere the log is for machines."""
    error = errors.Aborted("too few clients")
    with pytest.raises(SystemExit) as end, exit_codes(), last_line_of_log():
        raise error
    assert end.value.code == 3
    assert caplog.record_tuples == [("lightsecagg", logging.ERROR, "too few clients")]
    assert capsys.readouterr().err == ""


def test_other_exceptions_are_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError), exit_codes():
        raise ZeroDivisionError


def test_json_goes_to_stdout_and_warnings_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    warn("slow loops")
    print_json({"seconds": 1.5, "name": "encode"})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"seconds": 1.5, "name": "encode"}
    assert err == "slow loops\n"


def test_json_is_never_invalid(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"loss": float("nan")})
