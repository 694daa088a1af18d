"""Products in R = F_q[X] / (X^n + 1), n a power of two with 2n | q - 1.

The leaves n..2n-1 of the product tree of `ntt` are the roots of X^n + 1, so evaluating there turns
a product in R into n products in F_q. A polynomial of degree below 2n that takes the values f(a)
there and vanishes at the other leaves is (1 - X^n) f / 2, whose low half is f / 2: one inverse
transform, scaled by 2, finds f.
"""

from __future__ import annotations

import numpy as np

from lightsecagg.errors import FieldError
from lightsecagg.field import kernels, ntt
from lightsecagg.field.prime import Elements, PrimeField


def times_key(field: PrimeField, blocks: Elements, key: Elements) -> Elements:
    """a_j * s in R for every column j of `blocks`, as columns of coefficients.

    * `blocks`: shape (n, L); column j holds the values of a_j at the leaves n..2n-1.
    * `key`: the n coefficients of s.
    """
    field.check_type(blocks)
    field.check_type(key)
    n = len(key)
    if key.ndim != 1 or blocks.ndim != 2 or len(blocks) != n:
        raise FieldError(f"a key of shape {key.shape} does not fit blocks of shape {blocks.shape}")
    if n != ntt.transform_size(n) or not ntt.supports(field, 2 * n):
        raise FieldError(f"F_q with q = {field.modulus} has no ring of dimension n = {n}")
    roots, inverses = ntt.all_leaves(field, 2 * n), ntt.inverse_leaves(field, 2 * n)
    positions = np.arange(n, 2 * n, dtype=np.int64)
    # The inverse transform is scaled by its size 2n, its low half by 1/2.
    scale = np.full(n, field.inverse(n), dtype=np.uint32)
    values = kernels.active().ntt_forward(
        key[:, None], None, positions, scale, roots, field.modulus
    )
    return kernels.active().ntt_inverse(blocks, positions, values[:, 0], n, inverses, field.modulus)
