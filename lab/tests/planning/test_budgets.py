"""What an honest client sends fits the byte budget of its phase (S25)."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_federation import SESSION, Federation

from lightsecagg.drivers.federation.aggregation import make_settings
from lightsecagg.drivers.transport.framing import chunks
from lightsecagg.protocol.interface import Phase
from lightsecagg.session import budgets
from lightsecagg.session.envelope import pack_protocol
from lightsecagg_lab.planning.traffic import share_counts


@pytest.mark.parametrize("protocol", ["lightsecagg", "secagg"])
@pytest.mark.parametrize("dimension", [1, 37, 5000])
def test_S25_shares_fit_the_budget_without_the_room_for_control_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, dimension: int
) -> None:
    """Short vectors too: a seed is then longer than the share that it stands for."""
    monkeypatch.setattr(budgets, "_CONTROL", 0)
    federation = Federation(tmp_path, 60, dimension=dimension, protocol=protocol)
    settings = make_settings(federation.aggregation, federation.job, SESSION, federation.allow_list)
    counts = share_counts(settings)
    around = sum(map(len, chunks(pack_protocol(1, b"")))) * counts.peers
    assert counts.bytes + around <= budgets.phase_budget(settings, Phase.SHARE)
