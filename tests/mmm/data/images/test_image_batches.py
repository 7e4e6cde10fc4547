"""Image batches: the same global batch whatever the mesh and the workers; every test image counts exactly once."""

import numpy as np
import pytest
import torch

from mmm.data.images.batches import BatchOrder, ImageLoader, evaluation
from mmm.data.images.datasets import load_images
from mmm.data.images.fake import FakeImages
from mmm.data.images.image_set import ImagesInMemory
from mmm.errors import DataError
from mmm.layout import PADDING

# 50 images of four classes.
FAKE = FakeImages(50, (3, 8, 8), 4, seed=5)
# A class an image: its label is its index.
NUMBERED = FakeImages(50, (1, 4, 4), 50, seed=5)
# 1,797 real images, enlarged.
DIGITS = load_images("digits", image_size=28).train


class Unreadable(FakeImages):
    in_memory = False

    def pixels(self, indices):
        raise DataError("/data/cat/7.png is not a whole image")


def same(a, b):
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


@pytest.mark.parametrize("image_set", [FAKE, DIGITS], ids=["fake", "digits"])
@pytest.mark.parametrize("dp", [2, 3, 4])
def test_parts_make_the_global_batch(image_set, dp):
    batches = BatchOrder(image_set, 24, seed=3)
    full = batches.batch(3)
    parts = [batches.batch(3, c * 24 // dp, 24 // dp) for c in range(dp)]
    for field in ("inputs", "targets"):
        assert torch.equal(torch.cat([getattr(piece, field) for piece in parts]), getattr(full, field))
    assert {piece.count for piece in parts} == {full.count} == {24}


def test_an_epoch_has_every_image_once_in_an_order_of_its_own():
    batches = BatchOrder(NUMBERED, 10, seed=3)
    orders = [torch.cat([batches.batch(epoch * 5 + s).targets for s in range(5)]).tolist() for epoch in range(2)]
    assert [sorted(order) for order in orders] == [list(range(50))] * 2
    assert orders[0] != orders[1] != sorted(orders[1])
    other = BatchOrder(NUMBERED, 10, seed=4)
    assert orders[0] != torch.cat([other.batch(step).targets for step in range(5)]).tolist()
    # Fixed for ever
    assert orders[0] == np.random.RandomState([3, 0]).permutation(50).tolist()


def test_the_last_global_batch_is_dropped_or_counted_as_it_is():
    assert BatchOrder(NUMBERED, 16).steps_per_epoch == 3
    batches = BatchOrder(NUMBERED, 16, train=False)
    assert batches.steps_per_epoch == 4
    parts = [batches.batch(3, first, 4) for first in (0, 4, 8, 12)]
    assert [piece.count for piece in parts] == [2] * 4
    padded = [(piece.targets == PADDING).tolist() for piece in parts]
    assert padded == [[False, False, True, True], [True] * 4, [True] * 4, [True] * 4]
    assert parts[1].inputs.shape == (4, 1, 4, 4)
    assert not parts[1].inputs.any()
    # The next epoch begins.
    assert batches.batch(4).targets.tolist() == list(range(16))
    assert batches.batch(4).count == 16


@pytest.mark.parametrize("samples", [1, 2, 7, 47, 48, 49, 101])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_evaluation_counts_every_image_exactly_once(samples, dp):
    # The label is the index.
    image_set = FakeImages(samples, (1, 4, 4), max(2, samples), seed=0)
    loaders = [evaluation(image_set, 6, c, dp) for c in range(dp)]
    parts = [list(loader.epoch()) for loader in loaders]
    # As many forward passes on every rank.
    assert len({len(piece) for piece in parts}) == 1
    batches = [batch for piece in parts for batch in piece]
    assert {batch.inputs.shape for batch in batches} == {(6, 1, 4, 4)}
    counted = torch.cat([batch.targets[batch.targets != PADDING] for batch in batches]).tolist()
    # Not once more, and none left out.
    assert sorted(counted) == list(range(samples))
    for batch in batches:
        real = batch.targets != PADDING
        images, labels = image_set.images(batch.targets[real].tolist())
        assert torch.equal(batch.inputs[real], images)
        assert torch.equal(batch.targets[real], labels)


def test_a_coordinate_without_samples_has_batches_of_the_same_shape():
    enlarged = ImagesInMemory(np.zeros((3, 1, 2, 2)), np.zeros(3), "a", (0.0,), (1.0,), image_size=5, channels=3)
    (batch,) = evaluation(enlarged, 4, coordinate=1, dp=2).epoch()
    assert batch.inputs.shape == (4, 3, 5, 5)
    assert (batch.targets == PADDING).all()


@pytest.mark.parametrize("dp", [1, 3])
def test_workers_change_nothing(dp):
    batches = BatchOrder(FAKE, 12, seed=1)
    torch.manual_seed(0)
    loaded = [list(ImageLoader(batches, dp - 1, dp, workers=0).epoch(epoch)) for epoch in range(2)]
    ahead = ImageLoader(batches, dp - 1, dp, workers=2)
    for epoch in range(2):
        for one, other in zip(loaded[epoch], ahead.epoch(epoch), strict=True):
            assert same(one, other)
    abandoned = ahead.epoch(0)
    # Its workers have read ahead by then.
    next(abandoned)
    # A run that goes on begins within an epoch.
    for first in (0, 2):
        for one, other in zip(loaded[1][first:], ahead.epoch(1, first), strict=True):
            assert same(one, other)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(ImageLoader(batches, workers=0).epoch())
    # Reading data does not move the model's random numbers.
    assert torch.equal(torch.rand(3), expected)


def test_a_worker_hands_a_users_error_over_as_it_is():
    loader = ImageLoader(BatchOrder(Unreadable(8, (1, 4, 4), 2, seed=0), 4), workers=1)
    with pytest.raises(DataError, match=r"^/data/cat/7.png"):
        next(loader.epoch())


def test_a_set_that_is_smaller_than_a_global_batch():
    with pytest.raises(DataError, match="50 images, fewer than one global batch of 64"):
        BatchOrder(FAKE, 64)


def test_a_small_global_batch_covers_a_set_in_memory():
    pixels = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    image_set = ImagesInMemory(pixels, np.arange(5), "abcde", (0.0,), (1 / 255,))
    images, labels = image_set.images([4, 0, 4])
    assert images.flatten().round().tolist() == [4, 0, 4] == labels.tolist()
