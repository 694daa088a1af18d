"""Pseudo-random generator: a 32-byte seed becomes exactly uniform elements of F_q, or words.

Two parties expand the same seed (the owner of a mask and the recipient of a seeded share), so
every detail of this file is wire format:

1. The stream is AES-256-CTR, key = seed, counter block starting at zero, encrypting zeros.
2. It is read as little-endian 32-bit words w_0, w_1, ..., each cut to its low
   `bit_length(q - 1)` bits.
3. A cut word below q is accepted, any other rejected. For n elements, element i is w_i if that is
   accepted. The rejected positions, in order, take the next accepted words after word n - 1.

Cutting and rejecting make every element uniform on [0, q) if the stream is, for every q. The patch
rule in step 3 keeps the accepted words where they are, so nothing is compacted.

Of Z_{2^32} every word is an element: element i is w_i (`add_words`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.crypto.transcript import KEY_LENGTH, derive_key
from lightsecagg.errors import CryptoError, FieldError, ParameterError
from lightsecagg.field import kernels

SEED_LENGTH: Final = KEY_LENGTH
"""Bytes in a seed: an AES-256 key."""

Keystream = Callable[[NDArray[np.uint32]], None]
"""Overwrites the given array with the next words of a stream."""

BLOCK_WORDS: Final = 1 << 18
"""1 MiB: enough to amortise the calls, little enough that a block is still in the cache when its
words are cut and compared."""

_ADDED_WORDS: Final = 1 << 16
"""256 KiB, and a total of as many words beside it: both stay in the second-level cache."""

_SIDE_BY_SIDE: Final = 64
"""Streams that pass one part of the totals together, so that it is fetched once for all of them."""

_WORDS_PER_BLOCK: Final = 4
"""Of AES: where the counter is one higher."""

_ZEROS: Final = memoryview(bytes(4 * BLOCK_WORDS))


def expand(
    seed: bytes, length: int, modulus: int, out: NDArray[np.uint32] | None = None
) -> NDArray[np.uint32]:
    """Expand `seed` to `length` uniform elements of [0, modulus); into `out` if it is given.

    - `seed` is 32 uniform bytes that are expanded for one purpose only (see `derive_seed`).
    - `modulus` is in [2, 2^32); any prime field of this package qualifies.
    - `out`, if given, is a contiguous uint32 vector of `length` elements.
    """
    if length < 0:
        raise ParameterError(f"cannot expand a seed to {length} elements; the length must be >= 0")
    if out is None:
        out = np.empty(length, dtype=np.uint32)
    elif out.shape != (length,) or out.dtype != np.uint32 or not out.flags.c_contiguous:
        raise FieldError(
            f"the output must be a contiguous uint32 vector of {length} elements, "
            f"not {out.dtype} of shape {out.shape}"
        )
    fill_uniform(aes_ctr_keystream(seed), modulus, out)
    return out


def draw_uniform(
    length: int, modulus: int, entropy: Entropy = system_entropy
) -> NDArray[np.uint32]:
    """`length` fresh uniform elements of [0, modulus), from one fresh seed."""
    return expand(draw(entropy, SEED_LENGTH), length, modulus)


def draw_bound(
    length: int, modulus: int, entropy: Entropy, context: bytes, label: str, *parts: bytes
) -> NDArray[np.uint32]:
    """`length` fresh uniform elements of [0, modulus) for one purpose, safe if `entropy` repeats.

    Every word is drawn, then encrypted under a drawn key that is bound to the purpose. Uniform
    words stay exactly uniform, whatever AES is worth: given the key, this is a permutation. And a
    source that repeats itself (a cloned machine, a broken generator) still gives independent
    elements for another context, label or part, because then AES hides the repetition.
    """
    key = derive_seed(draw(entropy, SEED_LENGTH), context, label, *parts)
    out = np.empty(length, dtype=np.uint32)
    fill_uniform(_aes_ctr(key, lambda count: draw(entropy, count)), modulus, out)
    return out


def derive_seed(seed: bytes, context: bytes, label: str, *parts: bytes) -> bytes:
    """Derive an independent seed for one purpose: HKDF-SHA256(seed, context, label | parts)."""
    _check_seed(seed)
    return derive_key(seed, context, label, *parts)


def add_words(totals: NDArray[np.uint32], seeds: Iterable[bytes], start: int = 0) -> None:
    """Add the words of every seed's stream, from word `start` on, to `totals`, modulo 2^32.

    A part of the streams costs what it is long, wherever it starts.
    """
    buffer = np.empty(min(totals.size, _ADDED_WORDS), dtype=np.uint32)
    for batch in _batches(seeds, _SIDE_BY_SIDE):
        streams = [_encryptor(seed, start) for seed in batch]
        for begin in range(0, totals.size, _ADDED_WORDS):
            part = totals[begin : begin + _ADDED_WORDS]
            words = buffer[: part.size]
            into, zeros = words.data.cast("B"), _ZEROS[: words.nbytes]
            for stream in streams:
                stream.update_into(zeros, into)
                np.add(part, words, out=part)


def _batches(seeds: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    remaining = iter(seeds)
    while batch := list(islice(remaining, size)):
        yield batch


def aes_ctr_keystream(seed: bytes) -> Keystream:
    """The AES-256-CTR stream of `seed`, as 32-bit little-endian words."""
    return _aes_ctr(seed, lambda count: _ZEROS[:count])


def _aes_ctr(seed: bytes, plaintext: Callable[[int], bytes | memoryview]) -> Keystream:
    """What AES-256-CTR makes of `plaintext`, which is asked for block by block."""
    encryptor = _encryptor(seed)

    def next_words(words: NDArray[np.uint32]) -> None:
        for start in range(0, len(words), BLOCK_WORDS):
            block = words[start : start + BLOCK_WORDS]
            encryptor.update_into(plaintext(block.nbytes), block.data.cast("B"))

    return next_words


def _encryptor(seed: bytes, start: int = 0) -> CipherContext:
    """AES-256-CTR under `seed`, about to encrypt word `start`."""
    _check_seed(seed)
    counter, skipped = divmod(start, _WORDS_PER_BLOCK)
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(counter.to_bytes(16, "big"))).encryptor()
    encryptor.update(bytes(4 * skipped))
    return encryptor


def fill_uniform(keystream: Keystream, modulus: int, out: NDArray[np.uint32]) -> None:
    """Fill `out` with uniform elements of [0, modulus) by the rule at the top of this file."""
    expansion = Expansion(keystream, modulus)
    for start in range(0, len(out), BLOCK_WORDS):
        expansion.fill(out[start : start + BLOCK_WORDS])
    positions, values = expansion.patches()
    out[positions] = values


class Expansion:
    """Uniform elements of [0, modulus) block by block, for whoever only wants to add them up.

    Call `fill` for one block after the other, then `patches` once.
    """

    def __init__(self, keystream: Keystream, modulus: int) -> None:
        if not 2 <= modulus < 2**32:
            raise ParameterError(f"the modulus must be in [2, 2^32), not {modulus}")
        self._keystream = keystream
        self._modulus = modulus
        self._rejected = [np.empty(0, dtype=np.int64)]
        self._filled = 0

    def fill(self, block: NDArray[np.uint32]) -> None:
        """Overwrite `block` with the next elements; those still missing are zero."""
        self._keystream(block)
        rejects = kernels.active().cut_and_find(block, self._modulus)
        if len(rejects):
            block[rejects] = 0
            self._rejected.append(rejects + self._filled)
        self._filled += len(block)

    def patches(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """The positions still missing, over all blocks, and the elements that belong there."""
        positions = np.concatenate(self._rejected)
        return positions, _next_accepted(self._keystream, self._modulus, len(positions))


def _next_accepted(keystream: Keystream, modulus: int, count: int) -> NDArray[np.uint32]:
    """The next `count` accepted words of the stream; what follows them is never used."""
    found = np.empty(count, dtype=np.uint32)
    have = 0
    # At least half of all words are accepted; a margin makes a second turn of the loop rare.
    acceptance = modulus / (1 << (modulus - 1).bit_length())
    while have < count:
        wanted = int((count - have) / acceptance * 1.01) + 16
        words = np.empty(min(wanted, BLOCK_WORDS), dtype=np.uint32)
        keystream(words)
        rejects = kernels.active().cut_and_find(words, modulus)
        # Most often there are none, and `np.delete` takes longer than the rest of this loop.
        accepted = (np.delete(words, rejects) if len(rejects) else words)[: count - have]
        found[have : have + len(accepted)] = accepted
        have += len(accepted)
    return found


def _check_seed(seed: bytes) -> None:
    if len(seed) != SEED_LENGTH:
        raise CryptoError(f"a seed has {SEED_LENGTH} bytes, not {len(seed)}")
