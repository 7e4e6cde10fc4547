"""Sets of images: shapes, normalisation, the digits that come with the package, made-up images, the record."""

import hashlib
from importlib import resources

import numpy as np
import pytest
import torch

from mmm.data.images import digits
from mmm.data.images.datasets import load_images
from mmm.data.images.fake import FakeImages
from mmm.data.images.image_set import convert_channels, resize

# --- digits ---------------------------------------------------------------------------------------------------------


def test_the_digits_are_scikit_learns_byte_for_byte():
    packed = resources.files("mmm.data.images").joinpath("embedded/digits.csv.gz").read_bytes()
    assert hashlib.sha256(packed).hexdigest() == "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
    assert "BSD 3-Clause" in resources.files("mmm.data.images").joinpath("embedded/README.md").read_text(
        encoding="utf-8"
    )
    images, labels = digits.read()
    assert images.shape == (1797, 8, 8)
    assert images.max() == 16
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


# --- made-up images -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 16, 24)])
def test_made_up_images_can_be_learned(shape):
    train, test = FakeImages(500, shape, 10, seed=1), FakeImages(300, shape, 10, seed=1, first=500)
    (images, labels), (test_images, test_labels) = train.images(range(500)), test.images(range(300))
    assert labels.bincount().tolist() == [50] * 10
    centres = torch.stack([images[labels == c].mean(0) for c in range(10)]).flatten(1)
    found = torch.cdist(test_images.flatten(1), centres).argmin(1)
    assert (found == test_labels).float().mean() > 0.9
    assert images.std() == pytest.approx(0.75, abs=0.25)
    assert len(torch.cat([images, test_images]).flatten(1).unique(dim=0)) == 800  # no two alike


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_an_image_is_the_same_in_any_batch():
    pixels = torch.randint(0, 256, (9, 3, 11, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for channels in (1, 3):
        whole = resize(convert_channels(pixels, channels), (28, 30))
        for i in range(9):
            assert torch.equal(resize(convert_channels(pixels[i : i + 1], channels), (28, 30)), whole[i : i + 1])
    exact = torch.nn.functional.interpolate(pixels.double(), (28, 30), mode="bilinear", antialias=True)
    assert (resize(pixels, (28, 30)) - exact).abs().max() <= 1


# --- names and the record -------------------------------------------------------------------------------------------


def test_the_record():
    record = load_images("digits", channels=3, image_size=32).describe()
    assert record["dataset"] == record["dataset_asked"] == "digits"
    assert (record["train_images"], record["test_images"], record["classes"]) == (1437, 360, 10)
    assert record["class_names"] == list("0123456789")
    assert record["image_shape"] == [3, 32, 32]
    assert "UCI" in record["source"]
    assert len(record["sha256"]) == 64
    assert record["note"] == ""
