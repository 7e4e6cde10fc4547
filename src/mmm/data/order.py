"""The order of samples: a function of the seed and the epoch."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np

_ROUNDS = 6


def stream(seed: int, *place: int) -> list[int]:
    """The 32-bit integers that seed a ``RandomState``: lower half of the seed, `place`, upper half if it is not 0.

    Without an upper half, a seed of 32 bits draws what it always drew.

    Args:
        seed: seed of 64 bits.
        place: which of that seed's streams, such as the epoch.
    """
    # RandomState takes numbers of 32 bits.
    low = seed & 0xFFFFFFFF
    high = seed >> 32 & 0xFFFFFFFF
    if high:
        return [low, *place, high]
    return [low, *place]


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, samples: int, block: int = 1) -> np.ndarray:
    """The order of an epoch's samples: (samples,) indices.

    NumPy promises never to change what ``RandomState`` draws.

    Args:
        block: number of consecutive samples that stay together. Blocks are shuffled, then the samples in each.
    """
    state = np.random.RandomState(stream(seed, epoch))
    order = state.permutation(samples)
    if block == 1:
        return order
    # (samples,): which place its block gets, for each sample
    place_of_block = state.permutation((samples + block - 1) // block)
    places = place_of_block[np.arange(samples) // block]
    # Sorted by the place of the block, then by the random order.
    return np.lexsort((order, places))


def permuted(place: int, samples: int, seed: int, epoch: int) -> int:
    """Which sample stands at `place` of an epoch. Computes a permutation of 0 … samples - 1 without storing it.

    A Feistel network (Luby and Rackoff 1988) permutes the smallest power of two that holds all samples. A result beyond
    the last sample goes through the network again until it is a sample (cycle walking: Black and Rogaway 2002), which
    happens less than once on average.
    """
    key = b"%d %d" % (seed, epoch)
    # A number of so many bits is split into two halves, which the network mixes in rounds.
    bits = max((samples - 1).bit_length(), 2)
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask = (1 << low_bits) - 1
    high_mask = (1 << high_bits) - 1
    while True:
        left = place >> low_bits
        right = place & low_mask
        for round_index in range(_ROUNDS):
            message = b"%d %d" % (round_index, right)
            digest = blake2b(message, key=key, digest_size=8).digest()
            # Each round changes the left half and swaps the two: the left one has high_bits in even rounds only.
            mask = high_mask if round_index % 2 == 0 else low_mask
            mixed = (left ^ int.from_bytes(digest, "little")) & mask
            left = right
            right = mixed
        place = left << low_bits | right
        if place < samples:
            return place
