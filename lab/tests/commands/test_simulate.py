"""`lightsecagg simulate`: its document, its table, its exit codes and its refusals."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from lightsecagg.cli.main import main
from lightsecagg.drivers import footprint
from lightsecagg.field import kernels

PHASES = ["advertise", "share", "upload", "agree", "recover"]
COSTS = {
    "client_seconds",
    "server_seconds",
    "server_cpu_seconds",
    "server_spread_cpu_seconds",
    "server_spread_wall_seconds",
    "client_upload_bytes",
    "client_download_bytes",
    "server_bytes",
    "link_seconds",
}
SMALL = ["--clients", "8", "--privacy", "2", "--dropouts", "2", "--dim", "100"]


class Terminal:
    """Runs the console script in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        self._monkeypatch.setattr(sys, "argv", ["lightsecagg", "simulate", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = self._capsys.readouterr()
        return int(end.value.code or 0), out, err

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The JSON document of a run that ends with `code`."""
        ended, out, err = self.run(*arguments, "--json")
        assert ended == code, err
        return json.loads(out)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


def test_off_a_terminal_there_is_a_line_per_phase(terminal: Terminal) -> None:
    code, _, err = terminal.run(*SMALL)
    assert code == 0
    phases = ["advertise", "share", "upload", "recover"]
    assert err.splitlines() == [f"lightsecagg: {phase}" for phase in phases]


@pytest.mark.parametrize("protocol", ["lightsecagg", "secagg", "secagg+", "plain"])
def test_the_document_of_one_round(terminal: Terminal, protocol: str) -> None:
    document = terminal.json(*SMALL, "--protocol", protocol, "--drop", "upload=2")
    assert document["protocol"] == protocol
    assert document["exact"] is True
    assert document["included"] == 6
    assert document["responders"] == (0 if protocol == "plain" else 6)
    assert document["aborted"] is None
    assert list(document["phases"]) == PHASES
    assert all(set(costs) == COSTS for costs in document["phases"].values())
    assert document["phases"]["upload"]["client_upload_bytes"] > 400
    assert document["parameters"]["clients"] == 8
    assert document["parameters"]["drop"] == ["upload:before=2"]
    assert document["parameters"]["kernels"] == kernels.backend()
    spans = document["timeline"]
    assert all(set(span) == {"party", "phase", "start", "end"} for span in spans)
    assert document["round_seconds"] == max(span["end"] for span in spans)


def test_all_protocols_and_several_rounds_come_as_runs(terminal: Terminal) -> None:
    document = terminal.json(*SMALL, "--protocol", "all", "--rounds", "2")
    assert [(run["protocol"], run["round"]) for run in document["runs"]] == [
        (protocol, round_)
        for protocol in ("lightsecagg", "secagg", "secagg+", "plain")
        for round_ in (1, 2)
    ]
    assert all(run["exact"] for run in document["runs"])


def test_all_in_malicious_mode_leaves_out_what_has_none_and_says_so(terminal: Terminal) -> None:
    code, out, err = terminal.run(
        *SMALL, "--protocol", "all", "--threat-model", "malicious-server", "--json"
    )
    assert code == 0
    runs = json.loads(out)["runs"]
    assert [run["protocol"] for run in runs] == ["lightsecagg", "secagg"]
    assert all(run["phases"]["agree"]["client_upload_bytes"] > 0 for run in runs)
    assert "secagg+ and plain" in err


def test_an_aborted_round_exits_with_3_and_still_prints(terminal: Terminal) -> None:
    document = terminal.json(*SMALL, "--drop", "upload=3", code=3)
    assert document["aborted"].startswith("only 5 clients uploaded")
    assert document["exact"] is None
    assert document["included"] == 0
    code, out, _ = terminal.run(*SMALL, "--drop", "upload=3")
    assert code == 3
    assert "aborted: only 5 clients uploaded" in out


def test_it_runs_without_any_option(terminal: Terminal) -> None:
    parameters = terminal.json()["parameters"]
    found = [parameters[name] for name in ("clients", "privacy", "dropouts", "dim")]
    assert found == [10, 2, 2, 10_000]
    found = [
        terminal.json("--clients", "4")["parameters"][name] for name in ("privacy", "dropouts")
    ]
    assert found == [1, 1]


def test_all_protocols_are_compared_in_one_table(terminal: Terminal) -> None:
    _, out, _ = terminal.run(*SMALL, "--protocol", "all")
    last = out[out.index("all of them") :]
    assert [
        name for name in ("lightsecagg", "secagg", "secagg+", "plain") if name not in last
    ] == []
    _, out, _ = terminal.run(*SMALL)
    assert "all of them" not in out


def test_the_table_tells_the_essentials(terminal: Terminal) -> None:
    code, out, _ = terminal.run(*SMALL, "--drop", "recover:after=1", "--training-seconds", "2")
    assert code == 0
    for essential in ("N = 8", "T = 2", "U = 6", "d = 100", "share", "recover", "is exact"):
        assert essential in out
    assert "8 of 8 clients included, 8 answered" in out
    assert "agree" not in out


def test_parameters_reach_the_round(terminal: Terminal) -> None:
    document = terminal.json(
        *SMALL,
        *("--survivors", "5", "--share-mode", "paper", "--field", "paper"),
        *("--threat-model", "malicious-server", "--bandwidth", "10", "--latency", "50"),
        *("--topology", "direct", "--training-seconds", "7", "--no-overlap", "--seed", "3"),
    )
    parameters = document["parameters"]
    assert parameters["survivors"] == 5
    assert parameters["share_mode"] == "paper"
    assert parameters["modulus"] == 2**32 - 5
    assert parameters["threat_model"] == "malicious-server"
    assert parameters["overlap"] is False
    assert document["phases"]["agree"]["client_upload_bytes"] > 64
    # Two ways of 50 ms in every phase, and shares that do not pass the server.
    assert document["phases"]["recover"]["link_seconds"] >= 0.1
    shares = document["phases"]["share"]
    assert shares["server_bytes"] < 8 * shares["client_download_bytes"]
    training = [span for span in document["timeline"] if span["phase"] == "training"]
    assert len(training) == 1
    assert training[0]["end"] - training[0]["start"] == pytest.approx(7)
    assert training[0]["start"] > 0
    assert document["round_seconds"] > 7


def test_weak_secagg_plus_is_allowed_and_labelled_insecure(terminal: Terminal) -> None:
    arguments = [
        *("--clients", "40", "--privacy", "15", "--dropouts", "5", "--dim", "10"),
        *("--protocol", "secagg+", "--neighbours", "8", "--threshold", "3"),
    ]
    document = terminal.json(*arguments)
    assert document["parameters"]["leak_probability"] > 0.5
    assert document["warnings"][0].startswith("insecure parameters: with k = 8 and t = 3")
    _, out, _ = terminal.run(*arguments)
    assert "insecure parameters" in out
    found = terminal.json(*arguments[:-4])
    assert found["warnings"] == []
    assert found["parameters"]["leak_probability"] < 2**-40


def test_the_seed_steers_who_drops(terminal: Terminal) -> None:
    from lightsecagg_lab.simulation import scenario

    def included(seed: str) -> tuple[int, ...]:
        seen: list[tuple[int, ...]] = []
        original = scenario.Outcome.document

        def spy(self: scenario.Outcome) -> dict[str, Any]:
            assert self.report.aggregate is not None
            seen.append(self.report.aggregate.included)
            return original(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scenario.Outcome, "document", spy)
            terminal.json(*SMALL, "--drop", "upload=2", "--seed", seed)
        return seen[0]

    chosen = {seed: included(seed) for seed in ("0", "1", "2", "3")}
    assert included("0") == chosen["0"]
    assert len(set(chosen.values())) > 1


def test_sampled_clients_have_no_sum_to_compare_with(terminal: Terminal) -> None:
    document = terminal.json(*SMALL, "--sample-clients", "2", "--drop", "upload=2")
    assert document["exact"] is None
    assert document["aborted"] is None
    assert document["included"] == 6
    assert document["parameters"]["sample_clients"] == 2
    _, out, _ = terminal.run(*SMALL, "--sample-clients", "2")
    assert "no sum to compare with" in out


def test_clipping_must_be_asked_for(terminal: Terminal) -> None:
    code, out, err = terminal.run(*SMALL, "--bound", "0.5", "--json")
    assert code == 2
    assert out == ""
    assert "beyond the bound 0.5" in err
    assert terminal.json(*SMALL, "--bound", "0.5", "--clip")["exact"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--survivors", "2"], "survivors U = 2 must exceed privacy T = 2"),
        (["--drop", "lunch=1"], "PHASE is one of advertise, share, upload, agree, recover"),
        (["--drop", "agree=1"], "malicious-server mode only"),
        (["--drop", "upload=9"], "9 clients should drop, but there are only 8"),
        (["--neighbours", "4"], "neighbours are for secagg+"),
        (["--threshold", "4"], "a threshold is for secagg and secagg+"),
        (["--protocol", "secagg+", "--neighbours", "4"], "together"),
        (["--protocol", "secagg", "--threshold", "7"], "only 6 remain"),
        (["--protocol", "secagg+", "--threat-model", "malicious-server"], "refused"),
        (["--bandwidth", "0"], "positive number of Mbit/s"),
        (["--latency", "-1"], "at least 0"),
        (["--training-seconds", "-1"], "at least 0"),
        (["--sample-clients", "7"], "between 1 and U = 6"),
        (["--rounds", "0"], "rounds = 0 must be at least 1"),
        (["--seed", "-1"], "seed = -1 must be at least 0"),
        (["--bound", "0"], "bound = 0.0 must be positive"),
        (["--buffer", "4"], "--buffer belongs to the asynchronous mode; add --mode async"),
        (["--tau-max=4"], "--tau-max belongs to the asynchronous mode"),
        (["--privacy", "7"], "protects nobody from T colluders; lower privacy"),
    ],
)
def test_what_a_user_can_get_wrong_is_named(
    terminal: Terminal, arguments: list[str], message: str
) -> None:
    code, out, err = terminal.run(*SMALL, *arguments, "--json")
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_run_that_would_not_fit_is_refused_with_a_forecast(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "available_memory", lambda: 2 * 10**9)
    large = ["--clients", "200", "--privacy", "100", "--dropouts", "60", "--dim", "1206590"]
    code, _, err = terminal.run(*large)
    assert code == 2
    assert "would need about" in err
    assert "2.0 GB are available" in err
    assert "--sample-clients" in err


SHORT = ["--clients", "8", "--privacy", "2", "--dropouts", "2", "--survivors", "4"]
SHORT += ["--dim", "3000", "--share-mode", "short-key"]


def test_S49_short_keys_say_what_they_assume_and_how_they_decode(terminal: Terminal) -> None:
    document = terminal.json(*SHORT, "--drop", "upload=2")
    assert (document["exact"], document["largest_error"]) == (True, 0)
    assert document["parameters"]["decoding"] == "exact"
    assert any("ring-LWE" in warning for warning in document["warnings"])
    dithered = terminal.json(*SHORT, "--decoding", "dithered")
    assert dithered["exact"] is False
    assert 0 < dithered["largest_error"] < 300
    _, out, _ = terminal.run(*SHORT, "--decoding", "dithered")
    assert "the noise of dithered decoding" in out
    assert "WRONG" not in out


def test_S49_shares_of_short_keys_do_not_grow_with_the_vector(terminal: Terminal) -> None:
    longer = [*SHORT[:-4], "--dim", "9000", *SHORT[-2:]]
    sizes = [
        terminal.json(*arguments)["phases"]["share"]["client_upload_bytes"]
        for arguments in (SHORT, longer)
    ]
    assert sizes[0] == sizes[1]


def test_S49_sampled_clients_have_short_keys_too_but_no_exact_sum(terminal: Terminal) -> None:
    document = terminal.json(*SHORT, "--sample-clients", "3")
    assert document["exact"] is None
    assert document["parameters"]["decoding"] == "dithered"
    code, _, err = terminal.run(*SHORT, "--sample-clients", "3", "--decoding", "exact")
    assert code == 2
    assert "take dithered decoding" in " ".join(err.split())


def test_S49_short_keys_are_for_lightsecagg_and_the_default_field(terminal: Terminal) -> None:
    for arguments, said in (
        (["--protocol", "secagg"], "not for secagg"),
        (["--field", "paper"], "need the modulus"),
    ):
        code, _, err = terminal.run(
            *SHORT[:4], "--dropouts", "2", "--dim", "3000", *SHORT[-2:], *arguments
        )
        assert code == 2
        assert said in " ".join(err.split())


def test_the_seconds_of_a_server_with_several_cores_are_its_serial_work_and_a_part_of_the_rest(
    terminal: Terminal,
) -> None:
    document = terminal.json(*SMALL, "--server-cores", "4")
    assert document["exact"] is True
    assert document["parameters"]["server_cores"] == 4
    for costs in document["phases"].values():
        spread = costs["server_spread_cpu_seconds"]
        expected = costs["server_cpu_seconds"] - spread + spread / 4
        assert costs["server_seconds"] == pytest.approx(expected)
    assert document["phases"]["upload"]["server_spread_cpu_seconds"] > 0
    assert document["phases"]["upload"]["server_spread_wall_seconds"] > 0
