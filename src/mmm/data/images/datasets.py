"""Image data sets by name, such as ``load_images("mnist")``. Each source has a file of its own."""

from __future__ import annotations

from pathlib import Path

from mmm.data.cache import Refused, cache_folder
from mmm.data.images import digits, published
from mmm.data.images import folder as files
from mmm.data.images.fake import FakeImages
from mmm.data.images.image_set import ImageData
from mmm.errors import DataError

# Number of generated images in each set of ``fake``.
FAKE_TRAIN = 10_000
FAKE_TEST = 2_000


def load_images(
    name: str,
    data_dir: str | Path | None = None,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    classes: int = 10,
    seed: int = 0,
) -> ImageData:
    """Load a data set of images: read it from disk, download it once per host, or generate it.

    ======================== ===================================================================== =================
    name                     source                                                                original shape
    ======================== ===================================================================== =================
    mnist, fashion_mnist     torchvision's folder ``MNIST/raw``, or a download                     (1, 28, 28)
    cifar10                  ``cifar-10-batches-py``, or a download                                (3, 32, 32)
    digits                   comes with the package: 1,797 real 8 × 8 digits, enlarged             (1, 28, 28)
    fake                     generated, each class with its own pattern: it can be learned         (3, 32, 32)
    folder                   data_dir/{train,val}/class/*.png, or data_dir/class/*.png             (3, 224, 224)
    ======================== ===================================================================== =================

    If a data set is not on disk and cannot be downloaded, digits replaces it at the requested shape, and ``note`` says
    so. If `data_dir` is given, that is an error.

    Args:
        name: one of the names in the table.
        data_dir: folder of the files; it is only read. None means the cache: ``$MMM_DATA`` or, if it is not set,
            ``mmm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
        image_size: height and width in pixels; None keeps those of the data set.
        channels: 1 for grey or 3 for colour; None keeps those of the data set.
        classes: number of classes of ``fake``.
        seed: seed of ``fake``.

    Raises:
        DataError: `data_dir` lacks the data, or a file is damaged.
    """
    folder = None
    if data_dir is not None:
        folder = Path(data_dir).expanduser()
    if channels not in (None, 1, 3):
        raise DataError(f"images have 1 or 3 channels, not {channels}")
    if folder is not None and name in ("digits", "fake"):
        raise DataError(f"--dataset {name} reads no files, so --data_dir {folder} has no use: leave one of them out")
    if name == "digits":
        train, test = digits.load(image_size or 28, channels or 1)
        return ImageData(train, test, name=name, asked=name, source=digits.SOURCE)
    if name == "fake":
        size = image_size or 32
        shape = (channels or 3, size, size)
        # Both sets are of one sequence of images, so that they share the classes' patterns.
        fake_train = FakeImages(FAKE_TRAIN, shape, classes, seed)
        fake_test = FakeImages(FAKE_TEST, shape, classes, seed, first=FAKE_TRAIN)
        return ImageData(fake_train, fake_test, name=name, asked=name, source=f"made up from seed {seed}")
    if name == "folder":
        if folder is None:
            raise DataError("--dataset folder needs --data_dir DIR with a subfolder of images for each class")
        train_files, test_files, note = files.load(folder, image_size or 224, channels or 3)
        return ImageData(train_files, test_files, name=name, asked=name, source=str(folder), note=note)
    try:
        return published.load(name, folder, image_size, channels)
    # Never with a folder: the user's own data are not replaced.
    except Refused as refused:
        return _digits_instead(name, refused, image_size, channels)


def _digits_instead(name: str, refused: Refused, image_size: int | None, channels: int | None) -> ImageData:
    """The digits at the shape that was asked for, with a note that says so."""
    original = published.PUBLISHED[name]
    # At the shape of the data set that was asked for: a model's sizes stay the same.
    size = image_size or original.size
    note = (
        f"{name} is not in {cache_folder()} and cannot be downloaded ({refused}). In its place: digits, "
        f"{digits.SOURCE}, at {size}×{size}. For {name} itself, give --data_dir a folder with its files"
    )
    train, test = digits.load(size, channels or len(original.mean))
    return ImageData(train, test, name="digits", asked=name, source=digits.SOURCE, note=note)
