"""The order of samples: a function of the seed and the epoch."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np

_ROUNDS = 6


def stream(seed: int, *place: int) -> list[int]:
    """The 32-bit words that seed ``RandomState``: the seed's lower half, `place`, the upper half if it is not 0.

    Args:
        seed: of 64 bits. place: which stream of that seed.
    """
    low = seed & 0xFFFFFFFF
    high = seed >> 32 & 0xFFFFFFFF
    return [low, *place, high] if high else [low, *place]


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of an epoch's samples. ``RandomState`` is the generator whose stream NumPy promises never to change."""
    return np.random.RandomState(stream(seed, epoch)).permutation(samples)


def permuted(place: int, samples: int, seed: int, epoch: int) -> int:
    """Which sample stands at `place` of an epoch: a permutation of 0 … samples - 1, of which nothing is kept.

    A Feistel network (Luby and Rackoff 1988) permutes the smallest power of two that holds all samples; a number beyond
    the last sample goes through it again until it is one (cycle walking: Black and Rogaway 2002), less than once on
    average.
    """
    key = b"%d %d" % (seed, epoch)
    bits = max((samples - 1).bit_length(), 2)
    low = bits // 2
    widths = (low, bits - low)  # of the right half, in even and in odd rounds
    while True:
        left = place >> low
        right = place & (1 << low) - 1
        for number in range(_ROUNDS):
            # Even rounds change the left half, of bits - low bits, which then becomes the right one.
            message = b"%d %d" % (number, right)
            mixed = int.from_bytes(blake2b(message, key=key, digest_size=8).digest(), "little")
            left, right = right, (left ^ mixed) & (1 << widths[1 - number % 2]) - 1
        place = left << low | right
        if place < samples:
            return place
