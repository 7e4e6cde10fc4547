"""The computed order: each sample once, another order each epoch and seed, nothing kept."""

import hashlib
import signal
import time
from functools import partial
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mmm.data import RandomTokens, workers
from mmm.data.images.batches import BatchOrder
from mmm.data.images.fake import FakeImages
from mmm.data.local_batches import local_batches
from mmm.data.order import permuted
from mmm.data.text.tokens import TextTokens
from mmm.errors import DataError


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1024, 1025])
def test_each_sample_once(samples):
    for epoch in range(2):
        assert sorted(permuted(place, samples, 5, epoch) for place in range(samples)) == list(range(samples))


def test_coordinates_share_out_the_same_global_batches():
    full = list(islice(local_batches(20, 6, 0, 6, seed=3), 7))
    parts = [list(islice(local_batches(20, 6, first, 2, seed=3), 7)) for first in (0, 2, 4)]
    assert [list(chain(*shards)) for shards in zip(*parts, strict=True)] == full
    first = [*chain(*full[:3])]
    second = [*chain(*full[3:6])]
    # Each once at most; two are left out.
    assert len(set(first)) == len(set(second)) == 18
    assert sorted(first) != first != second
    # Another seed, another order.
    assert full != list(islice(local_batches(20, 6, 0, 6, seed=4), 7))


def test_a_global_batch_that_is_too_large_is_refused_at_once():
    with pytest.raises(DataError, match="21 samples"):
        local_batches(20, 21, 0, 21, seed=0)


# 4,000 tokens that count up, modulo 256.
TEXT = np.arange(4000, dtype=np.uint32).astype(np.uint8)
# Several of them have the same lowest 32 bits.
SEEDS = [3, 3 + (1 << 32), 3 - (1 << 32), 3 + (1 << 40), 3 - (1 << 63), (1 << 63) - 1, -1, (1 << 32) - 1]


def images(seed):
    return FakeImages(64, (1, 8, 8), 4, seed)


# What depends on a seed.
READ = {
    "text": lambda seed: TextTokens(TEXT, 16, seed).batch(20, 12, 0, 12).inputs,
    "random": lambda seed: RandomTokens(50, 16, seed).batch(2, 8, 0, 8).inputs,
    "order": lambda seed: BatchOrder(FakeImages(64, (1, 8, 8), 64, 0), 16, seed).batch(5).targets,
    "fake": lambda seed: images(seed).pixels(range(16)),
}
# Hashes of what seeds 0, 3 and 2³² - 1 have read since these orders were made.
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


class Rows(Dataset):
    """Row i is (i, i²). `fail` is called in the worker before each."""

    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.fail()
        return {"row": (torch.tensor([index, index**2]), str(index))}


@pytest.mark.parametrize(
    ("fail", "timeout", "message"),
    [
        (partial(signal.raise_signal, signal.SIGKILL), 20.0, "DataLoader worker"),
        (partial(time.sleep, 1), 0.5, "DataLoader timed out after 0.5 seconds"),
    ],
    ids=["killed", "stuck"],
)
def test_a_worker_that_does_not_come_back_is_said(fail, timeout, message):
    before = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(DataError, match=f"^the data cannot be read ahead: {message}.*; try it without workers"):
        next(workers.read(DataLoader(Rows(fail), 2, num_workers=1), timeout))
    # PyTorch's own, once there is one.
    assert before in (signal.SIG_DFL, signal.getsignal(signal.SIGCHLD))
