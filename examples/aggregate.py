"""Average six hospitals' model updates without showing any single one to the server.

python examples/aggregate.py
"""

from __future__ import annotations

import numpy as np

import lightsecagg

rng = np.random.default_rng()
updates = [
    {"weights": rng.normal(0, 0.1, (10, 4)), "bias": rng.normal(0, 0.1, 4)} for _ in range(6)
]
patients = [120, 340, 80, 510, 95, 220]

# Hospital 4 loses its connection before it uploads: two dropouts are allowed for.
received = [update if hospital != 4 else None for hospital, update in enumerate(updates)]
result = lightsecagg.aggregate(
    received,  # what each hospital contributes
    privacy=2,  # the server and any two hospitals together learn only the sum
    dropouts=2,  # any two may vanish
    weights=patients,  # nobody learns a single count either
    bound=1.0,  # entries lie in [-1, 1]
)

print(f"included: {result.included}, patients: {result.weight}")
expected = np.average(
    [updates[i]["bias"] for i in result.included],
    axis=0,
    weights=[patients[i] for i in result.included],
)
print(f"bias:     {np.round(result.mean['bias'], 4)}")
print(f"in clear: {np.round(expected, 4)}")
