"""All 64 bits of a seed decide the data; seeds of 32 bits give what they always gave."""

import hashlib

import numpy as np
import pytest

from mmm.data import RandomTokens, TextTokens
from mmm.data.images.batches import ImageBatches
from mmm.data.images.fake import FakeImages

TEXT = np.arange(4000, dtype=np.uint32).astype(np.uint8)
SEEDS = [3, 3 + (1 << 32), 3 - (1 << 32), 3 + (1 << 40), 3 - (1 << 63), (1 << 63) - 1, -1, (1 << 32) - 1]


def images(seed):
    return FakeImages(64, (1, 8, 8), 4, seed)


READ = {
    "text": lambda seed: TextTokens(TEXT, 16, seed).batch(20, 12, 0, 12).inputs,
    "random": lambda seed: RandomTokens(50, 16, seed).batch(2, 8, 0, 8).inputs,
    "order": lambda seed: ImageBatches(FakeImages(64, (1, 8, 8), 64, 0), 16, seed).batch(5).targets,
    "fake": lambda seed: images(seed).pixels(range(16)),
}
AS_BEFORE = {
    "text": ["c9c0a7ec950e81a9", "10fb3607336a8142", "2b53219715f0bc58"],
    "random": ["8c5d9e58ec7fba2f", "67fc76842f1989ff", "086f4f24d47d2cf1"],
    "order": ["54d0cd693fb9e15f", "06ec20c0b12339e7", "dafee21892cfba4e"],
    "fake": ["332fb5b913e51ff9", "b8fd6c2ece30d3f6", "8c134ce3735bb60f"],
}


def read(name, seed):
    return hashlib.sha256(np.asarray(READ[name](seed)).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", READ)
def test_every_bit_of_a_seed_counts(name):
    assert len({read(name, seed) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("name", READ)
def test_seeds_of_32_bits_keep_their_order(name):
    assert [read(name, seed) for seed in (0, 3, (1 << 32) - 1)] == AS_BEFORE[name]
