"""The figures that the paper states, for comparison: another machine, another implementation.

The paper measured on Amazon EC2 m3.medium instances over 320 Mbit/s. Its Table 2 is for a dropout
rate of 30 %: the totals of its Table 4 at 30 % give the CNN's gains (1614.4 / 127.3 = 12.7), and
"aggregation-only" is the non-overlapped total without training ((1631.5 - 22.8) / (144.7 - 22.8) =
13.2).
"""

from __future__ import annotations

from typing import NamedTuple


class Gains(NamedTuple):
    """Over SecAgg and over SecAgg+."""

    secagg: float
    secagg_plus: float


TABLE2: dict[str, dict[str, Gains]] = {
    "mnist": {
        "non-overlapped": Gains(6.7, 2.5),
        "overlapped": Gains(8.0, 2.9),
        "aggregation": Gains(13.0, 4.1),
    },
    "femnist": {
        "non-overlapped": Gains(11.3, 3.7),
        "overlapped": Gains(12.7, 4.1),
        "aggregation": Gains(13.2, 4.2),
    },
    "cifar10": {
        "non-overlapped": Gains(7.6, 2.8),
        "overlapped": Gains(9.5, 3.3),
        "aggregation": Gains(13.1, 3.9),
    },
    "gld23k": {
        "non-overlapped": Gains(3.3, 1.6),
        "overlapped": Gains(3.4, 1.7),
        "aggregation": Gains(13.0, 4.1),
    },
}

TABLE3: dict[float, Gains] = {
    98.0: Gains(8.5, 2.9),
    320.0: Gains(12.7, 4.1),
    802.0: Gains(13.5, 4.4),
}

# protocol -> phase -> seconds at 10, 30 and 50 %, non-overlapped; then the overlapped total
TABLE4: dict[str, dict[str, tuple[float, float, float]]] = {
    "lightsecagg": {
        "offline": (69.3, 69.0, 191.2),
        "training": (22.8, 22.8, 22.8),
        "uploading": (12.4, 12.2, 21.6),
        "recovery": (40.9, 40.7, 64.5),
        "total": (145.4, 144.7, 300.1),
        "overlapped": (123.4, 127.3, 283.2),
    },
    "secagg": {
        "offline": (95.6, 98.6, 102.6),
        "training": (22.8, 22.8, 22.8),
        "uploading": (10.7, 10.9, 11.0),
        "recovery": (911.4, 1499.2, 2087.0),
        "total": (1047.5, 1631.5, 2216.4),
        "overlapped": (1030.3, 1614.4, 2198.9),
    },
    "secagg+": {
        "offline": (67.9, 68.1, 69.2),
        "training": (22.8, 22.8, 22.8),
        "uploading": (10.7, 10.8, 10.7),
        "recovery": (379.1, 436.7, 495.5),
        "total": (470.5, 538.4, 608.2),
        "overlapped": (463.6, 521.3, 582.4),
    },
}
