"""A random order of any number of samples, without a list of them."""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 6


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
        left, right = place >> low, place & (1 << low) - 1
        for number in range(_ROUNDS):
            # Even rounds change the left half, of bits - low bits, which then becomes the right one.
            message = b"%d %d" % (number, right)
            mixed = int.from_bytes(blake2b(message, key=key, digest_size=8).digest(), "little")
            left, right = right, (left ^ mixed) & (1 << widths[1 - number % 2]) - 1
        place = left << low | right
        if place < samples:
            return place
