"""The 3-user example of Section 4, number by number (also in docs/mathematics.md).

N = 3, T = 1, D = 1, U = 2 over F_101, models of two entries; user 1 drops out. Positions count
from 0, the paper's users from 1.
"""

from __future__ import annotations

import pytest

from lightsecagg.errors import ParameterError
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import PrimeField
from lightsecagg.masks.mask_encoding import encode_mask
from lightsecagg.masks.one_shot_recovery import aggregate_shares, recover_mask, unmask
from lightsecagg.params import Parameters

F = PrimeField(101)
W = F.vector([[-1, 2, 1], [1, 1, 1]])

X = {1: [5, 10], 2: [20, 30], 3: [7, 90]}
Z = {1: [3, 99], 2: [11, 50], 3: [100, 64]}
NOISE = {1: [40, 8], 2: [77, 1], 3: [25, 60]}


def test_section_4_example_number_by_number() -> None:
    code = MdsCode.from_matrix(F, W, privacy=1)

    # Offline encoding and sharing of local masks: -z + n, 2z + n, z + n.
    encoded = {
        user: encode_mask(code, F.vector([Z[user]]), F.vector([NOISE[user]]), dimension=2)
        for user in (1, 2, 3)
    }
    shares = {user: [encoded[user].shares[j].tolist() for j in range(3)] for user in (1, 2, 3)}
    assert shares[1] == [[37, 10], [46, 4], [43, 6]]
    assert shares[2] == [[66, 52], [99, 0], [88, 51]]
    assert shares[3] == [[26, 97], [23, 87], [24, 23]]
    for user in (1, 2, 3):
        for entry in range(2):
            z, n = Z[user][entry], NOISE[user][entry]
            expected = [(-z + n) % 101, (2 * z + n) % 101, (z + n) % 101]
            assert [share[entry] for share in shares[user]] == expected

    # Masking and uploading of local models; user 1 drops out.
    uploads = {user: F.add(F.vector(X[user]), encoded[user].mask) for user in (2, 3)}
    assert uploads[2].tolist() == [31, 80]
    assert uploads[3].tolist() == [6, 53]

    # One-shot aggregate-model recovery.
    answers = {j: aggregate_shares(F, [encoded[2].shares[j], encoded[3].shares[j]]) for j in (1, 2)}
    assert answers[1].tolist() == [21, 87]  # user 2: 2 (z2 + z3) + n2 + n3
    assert answers[2].tolist() == [11, 74]  # user 3:    z2 + z3  + n2 + n3
    assert F.subtract(answers[1], answers[2]).tolist() == [10, 13]  # z2 + z3

    aggregate_mask = recover_mask(code, answers, dimension=2)
    assert aggregate_mask.tolist() == [10, 13]
    total = unmask(F, F.sum(uploads.values()), aggregate_mask)
    assert total.tolist() == [27, 19]  # x2 + x3 = (20 + 7, 30 + 90) mod 101


@pytest.mark.parametrize("dropped", [1, 2, 3])
def test_any_one_user_may_drop(dropped: int) -> None:
    code = MdsCode.from_matrix(F, W, privacy=1)
    encoded = {
        user: encode_mask(code, F.vector([Z[user]]), F.vector([NOISE[user]]), dimension=2)
        for user in (1, 2, 3)
    }
    alive = [user for user in (1, 2, 3) if user != dropped]
    answers = {
        j - 1: aggregate_shares(F, [encoded[user].shares[j - 1] for user in alive]) for j in alive
    }
    masked = F.sum([F.add(F.vector(X[user]), encoded[user].mask) for user in alive])
    total = unmask(F, masked, recover_mask(code, answers, dimension=2))
    assert total.tolist() == [sum(X[user][k] for user in alive) % 101 for k in range(2)]


def test_protocol_clients_refuse_the_example() -> None:
    """With two survivors and one colluder, "the sum" is one honest model: see deviations.md."""
    with pytest.raises(ParameterError, match=r"fewer than T \+ 2 = 3 protects nobody"):
        Parameters(clients=3, privacy=1, dropouts=1)
