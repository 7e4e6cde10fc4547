"""Image data sets by name: ``load_images("mnist")``. One file a source."""

from __future__ import annotations

from pathlib import Path

from mmm.data.cache import Refused, cache_folder
from mmm.data.images import digits, published
from mmm.data.images import folder as files
from mmm.data.images.fake import FakeImages
from mmm.data.images.image_set import ImageData
from mmm.errors import DataError

FAKE_TRAIN, FAKE_TEST = 10_000, 2_000  # samples of ``fake``


def load_images(
    name: str,
    data_dir: str | Path | None = None,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    classes: int = 10,
    seed: int = 0,
) -> ImageData:
    """A data set of images, read from disk, downloaded once a host, or generated.

    ======================== ===================================================================== =================
    name                     from                                                                  shape as it is
    ======================== ===================================================================== =================
    mnist, fashion_mnist     the four published .gz files, or torchvision's folder; downloaded     (1, 28, 28)
    cifar10                  ``cifar-10-batches-py``, likewise                                     (3, 32, 32)
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
        classes, seed: of ``fake``.

    Raises:
        DataError: `data_dir` lacks the data; a file is broken.
    """
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if channels not in (None, 1, 3):
        raise DataError(f"images have 1 or 3 channels, not {channels}")
    if folder is not None and name in ("digits", "fake"):
        raise DataError(f"--dataset {name} reads no files, so --data_dir {folder} has no use: leave one of them out")
    if name == "digits":
        train, test = digits.load(image_size or 28, channels or 1)
        return ImageData(train, test, name, name, digits.SOURCE)
    if name == "fake":
        shape = (channels or 3, image_size or 32, image_size or 32)
        return ImageData(
            FakeImages(FAKE_TRAIN, shape, classes, seed),
            FakeImages(FAKE_TEST, shape, classes, seed, first=FAKE_TRAIN),
            name,
            name,
            f"made up from seed {seed}",
        )
    if name == "folder":
        if folder is None:
            raise DataError("--dataset folder needs --data_dir DIR with a subfolder of images for each class")
        train_files, test_files, note = files.load(folder, image_size or 224, channels or 3)
        return ImageData(train_files, test_files, name, name, str(folder), note)
    try:
        return published.load(name, folder, image_size, channels)
    except Refused as refused:
        return _digits_instead(name, refused, image_size, channels)


def _digits_instead(name: str, refused: Refused, image_size: int | None, channels: int | None) -> ImageData:
    """The digits at the shape that was asked for, with a note that says so."""
    _, published_size, mean, _ = published.PUBLISHED[name]
    size = image_size or published_size
    note = (
        f"{name} is not in {cache_folder()} and cannot be downloaded ({refused}). In its place: digits, "
        f"{digits.SOURCE}, at {size}×{size}. For {name} itself, give --data_dir a folder with its files"
    )
    train, test = digits.load(size, channels or len(mean))
    return ImageData(train, test, "digits", name, digits.SOURCE, note)
