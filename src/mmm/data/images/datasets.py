"""Image data sets by name: ``load_images("mnist")``. One file a source."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mmm.data.download import File, Refused, cache_folder, obtain
from mmm.data.images import cifar, digits, idx
from mmm.data.images import folder as files
from mmm.data.images.fake import FakeImages
from mmm.data.images.image_set import ImageData, ImagesInMemory, Values
from mmm.errors import DataError
from mmm.runtime.ranks import Rank

NAMES = ("mnist", "fashion_mnist", "cifar10", "digits", "fake", "folder")


def load_images(
    name: str,
    data_dir: str | Path | None = None,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    classes: int = 10,
    samples: tuple[int, int] = (10_000, 2_000),
    seed: int = 0,
    ranks: Rank | None = None,
) -> ImageData:
    """A data set of images, read from disk, downloaded once a host, or generated.

    ======================== ===================================================================== =================
    name                     from                                                                  shape as it is
    ======================== ===================================================================== =================
    mnist, fashion_mnist     the four IDX files (.gz or not) in data_dir or the cache; downloaded  (1, 28, 28)
    cifar10                  ``cifar-10-batches-py`` or its tar.gz, likewise                       (3, 32, 32)
    digits                   comes with the package: 1,797 real 8 × 8 digits, enlarged             (1, 28, 28)
    fake                     generated, each class with its own pattern: it can be learned         (3, 32, 32)
    folder                   data_dir/{train,val}/class/*.png, or data_dir/class/*.png             (3, 224, 224)
    ======================== ===================================================================== =================

    Where a data set is neither on disk nor can be downloaded, digits replaces it at the shape asked for, and ``note``
    says so. With a `data_dir`, that is an error.

    Args:
        data_dir: only read, never written to. None: the cache, ``$MMM_DATA``, or else ``mmm`` in
            ``$XDG_CACHE_HOME`` or ``~/.cache``.
        image_size: height and width in pixels. channels: 1 or 3. None: as the data set is.
        classes, samples (train, test), seed: of ``fake``.
        ranks: who this process is, so that one rank of a host downloads and the others wait for it.

    Raises:
        DataError: no such data set; `data_dir` lacks the data; a file is broken.
    """
    folder = None if data_dir is None else Path(data_dir).expanduser()
    _check(name, folder, image_size)
    if name == "digits":
        train, test = digits.load(image_size or 28, channels or 1)
        return ImageData(train, test, name, name, digits.SOURCE)
    if name == "fake":
        shape = (channels or 3, image_size or 32, image_size or 32)
        return ImageData(
            FakeImages(samples[0], shape, classes, seed),
            FakeImages(samples[1], shape, classes, seed, first=samples[0]),
            name,
            name,
            f"made up from seed {seed}",
        )
    if name == "folder":
        if folder is None:
            raise DataError("--dataset folder needs --data_dir DIR with a subfolder of images for each class")
        return ImageData(*files.load(folder, image_size or 224, channels or 3), name, name, str(folder))
    return _load_published(_PUBLISHED[name], folder, image_size, channels, ranks)


def _check(name: str, folder: Path | None, image_size: int | None) -> None:
    """Raises DataError: what was asked for cannot be."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise DataError(f"--dataset {name}: no such data set{meant}; there are {', '.join(NAMES)}")
    if image_size is not None and image_size < 1:
        raise DataError(f"an image size of {image_size} pixels: it needs at least 1")
    if folder is not None and name in ("digits", "fake"):
        raise DataError(f"--dataset {name} reads no files, so --data_dir {folder} has no use: leave one of them out")
    if folder is not None and not folder.is_dir():
        raise DataError(f"--data_dir {folder}: there is no such folder")


# --- published sets -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Published:
    """A data set that can be downloaded.

    Attributes:
        find: the place in a folder where its files are, or None. read: train images and labels, test images and labels.
        to_fetch: its files. needed: the same, for a message. size: of an image as it is. mean, std: of the training
            images, pixels from 0 to 1.
    """

    name: str
    find: Callable[[Path], Path | None]
    read: Callable[[Path], idx.Arrays]
    to_fetch: Callable[[], tuple[File, ...]]
    needed: str
    classes: tuple[str, ...]
    size: int
    mean: Values
    std: Values


_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_IDX_NEEDED = f"{', '.join(idx.FILES)} (with or without .gz)"
_CIFAR_NEEDED = "cifar-10-batches-py or its tar.gz"
_CIFAR_STATISTICS: tuple[Values, Values] = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def _idx_set(name: str, torchvision_name: str, classes: tuple[str, ...], mean: float, std: float) -> _Published:
    folders = (name, f"{torchvision_name}/raw", "raw")
    listed = partial(idx.files, name)
    find = partial(idx.find, subfolders=folders)
    return _Published(name, find, idx.read_folder, listed, _IDX_NEEDED, classes, 28, (mean,), (std,))


_PUBLISHED = {
    published.name: published
    for published in (
        _idx_set("mnist", "MNIST", _DIGITS, 0.1307, 0.3081),
        _idx_set("fashion_mnist", "FashionMNIST", _CLOTHES, 0.2860, 0.3530),
        _Published(
            "cifar10", cifar.find, cifar.read, cifar.files, _CIFAR_NEEDED, cifar.CLASSES, 32, *_CIFAR_STATISTICS
        ),
    )
}


def _load_published(
    published: _Published,
    folder: Path | None,
    image_size: int | None,
    channels: int | None,
    ranks: Rank | None,
) -> ImageData:
    name, note = published.name, ""
    place = published.find(folder or cache_folder())
    if place is None and folder is not None:
        raise DataError(
            f"--data_dir {folder} does not hold {name}: it needs {published.needed}, or leave --data_dir out "
            f"to download it"
        )
    if place is None:
        home = cache_folder() / name
        try:
            obtain(home, published.to_fetch(), ranks)
            place = published.find(home)
        except Refused as refused:
            size, depth = image_size or published.size, channels or len(published.mean)
            note = (
                f"{name} is not in {cache_folder()} and cannot be downloaded ({refused}). In its place: digits, "
                f"{digits.SOURCE}, at {size}×{size}. For {name} itself, give --data_dir a folder with "
                f"{published.needed}"
            )
            return ImageData(*digits.load(size, depth), "digits", name, digits.SOURCE, note)
        if place is None:
            raise DataError(f"{home} does not hold {name} any more: remove that folder, and it is downloaded again")
    train_images, train_labels, test_images, test_labels = published.read(place)
    try:
        train, test = (
            ImagesInMemory(
                images.reshape(len(images), -1, *images.shape[-2:]),
                labels,
                published.classes,
                published.mean,
                published.std,
                image_size,
                channels,
            )
            for images, labels in ((train_images, train_labels), (test_images, test_labels))
        )
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    return ImageData(train, test, name, name, str(place))
