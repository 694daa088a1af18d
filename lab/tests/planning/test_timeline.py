"""The timeline of a round: one thing after the other, and training beside the offline phase."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.planning.timeline import PhaseTimes, round_seconds, timeline

PARTS = PhaseTimes(down=1.0, client=0.5, up=4.0, server=0.3)
ONE = 5.8
TIMES = {Phase.ADVERTISE: PARTS, Phase.SHARE: PARTS, Phase.UPLOAD: PARTS}


def test_training_overlaps_the_offline_phase() -> None:
    assert round_seconds(TIMES, 4.0, overlap=False) == pytest.approx(3 * ONE + 4)
    assert round_seconds(TIMES, 4.0, overlap=True) == pytest.approx(3 * ONE)
    assert round_seconds(TIMES, 20.0, overlap=True) == pytest.approx(20 + ONE)
    beside = timeline(TIMES, training=4.0, overlap=True)
    training = next(span for span in beside if span.phase == "training")
    assert (training.party, training.start, training.end) == ("client", 0.0, 4.0)


def test_without_overlap_every_span_begins_where_the_one_before_ends() -> None:
    apart = timeline(TIMES, training=4.0, overlap=False)
    assert [span.party for span in apart[:4]] == ["link", "client", "link", "server"]
    for earlier, later in pairwise(apart):
        assert later.start == pytest.approx(earlier.end)


def test_an_empty_round_takes_no_time() -> None:
    assert round_seconds({}, 0.0, overlap=True) == 0.0
