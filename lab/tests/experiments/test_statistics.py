"""Medians and quartiles: what tables print, and what ratios and recordings are judged by."""

from __future__ import annotations

import json

import pytest

from lightsecagg_lab.experiments.statistics import Spread, as_document, error_bars, spreads_in


def test_a_spread_is_the_median_between_its_quartiles() -> None:
    spread = Spread.of([9.0, 1.0, 2.0, 3.0, 4.0])
    assert spread == Spread(3.0, 2.0, 4.0)
    assert f"{spread:.1f}" == "3.0 (2.0-4.0)"
    assert f"{Spread.of([7]):,.0f}" == "7"
    assert error_bars([spread, Spread.exactly(1.0)]) == [[1.0, 0.0], [1.0, 0.0]]


def test_one_outlier_does_not_decide() -> None:
    """As it did: of one round each, the slow one made the ratio."""
    plain, outlier = [4.5, 4.5, 4.6, 4.4, 4.5, 4.5], 5.0
    light = [4.7, 4.6, 4.7, 4.7, 4.8, 4.7, 4.7]
    assert light[0] / outlier < 1, "a single round says that protection is free"
    ratio = Spread.of(light) / Spread.of([outlier, *plain])
    assert ratio.median == pytest.approx(4.7 / 4.5)
    assert ratio.low > 1


def test_the_range_of_a_ratio_is_all_that_the_quartiles_allow() -> None:
    assert Spread(4.0, 3.0, 6.0) / Spread(2.0, 1.5, 3.0) == Spread(2.0, 1.0, 4.0)


def test_spreads_are_found_again_in_a_document() -> None:
    figures = {"a": [Spread(1.0, 0.5, 2.0), 3], "b": {"c": Spread.exactly(4.0), "d": None}}
    found = spreads_in(json.loads(json.dumps(as_document(figures))))
    assert found == {"a/0": Spread(1.0, 0.5, 2.0), "b/c": Spread.exactly(4.0)}


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [
        (Spread(2.0, 1.0, 3.0), Spread(2.5, 1.5, 3.0), True),
        (Spread(2.0, 1.0, 3.0), Spread(2.5, 2.4, 2.6), False),  # within, but not both ways
        (Spread(2.0, 1.9, 2.1), Spread(3.0, 1.0, 4.0), False),
        (Spread.exactly(5.0), Spread.exactly(5.0), True),
    ],
)
def test_recordings_agree_if_each_median_is_in_the_others_range(
    first: Spread, second: Spread, agree: bool
) -> None:
    assert first.agrees_with(second) is agree
    assert second.agrees_with(first) is agree
