"""A folder of image files, one subfolder a class, decoded when they are read. One of::

data_dir/train/cat/*.jpg  data_dir/val/cat/*.jpg   two sets; ``val`` may be called ``validation`` or ``test``
data_dir/cat/*.jpg                                 one: a tenth is for testing, by a hash of each path

What is hidden (its name begins with a dot) is passed over: ``.ipynb_checkpoints``, ``._0.png`` of macOS.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmm.data.images.image_set import ImageSet, Indices, Values
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.errors import DataError
from mmm.outside import open_file

IMAGENET: tuple[Values, Values] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean, standard deviation
GREY: tuple[Values, Values] = ((0.5,), (0.25,))
TEST_NAMES = ("val", "validation", "test")
CHECKED = 100  # files of a set, spread over it, whose header is read before training begins
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}  # Pillow's, of 8 bits a channel or fewer
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP", "GIF")  # by content, not by the file's name
Files = list[tuple[str, int]]  # path, label


class ImageFiles(ImageSet):
    """Files decoded on reading: shorter side resized to `image_size`, centre crop, converted to grey or colour.

    Args:
        root: what the paths are under. files: (path under root, label).
    """

    in_memory = False

    def __init__(self, root: Path, files: Files, classes: Sequence[str], image_size: int, channels: int) -> None:
        self.root, self.classes, self.samples = root, tuple(classes), len(files)
        self.shape = (channels, image_size, image_size)
        self.mean, self.std = IMAGENET if channels == 3 else GREY
        self._paths = np.array([os.fsencode(path) for path, _ in files])  # a quarter of the memory of str
        self._labels = torch.tensor([label for _, label in files], dtype=torch.int64)
        self._transform: Any = None

    def pixels(self, indices: Indices) -> Tensor:
        if not len(indices):
            return torch.empty((0, *self.shape), dtype=torch.uint8)
        return torch.stack([self._read(self._path(index)) for index in indices])

    def labels(self, indices: Indices) -> Tensor:
        return self._labels[torch.as_tensor(np.asarray(indices, dtype=np.int64))]

    def digest(self) -> str:
        """Of the paths and labels, since reading every file would take as long as an epoch."""
        lines = (b"%s\t%d\n" % pair for pair in zip(self._paths.tolist(), self._labels.tolist(), strict=True))
        return hashlib.sha256(b"".join(lines)).hexdigest()

    def check_headers(self) -> None:
        """Read the header of some of the files.

        Raises:
            DataError: one is not an image.
        """
        for index in np.unique(np.linspace(0, self.samples - 1, min(CHECKED, self.samples)).astype(int)):
            _open(self._path(index)).close()

    def _path(self, index: int) -> Path:
        return self.root / os.fsdecode(self._paths[index])

    def _read(self, path: Path) -> Tensor:
        """(channels, size, size) uint8"""
        with _open(path) as image:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Pillow's, about palettes with transparency
                    square = self._to_square(image.convert("RGB" if self.shape[0] == 3 else "L"))
            except (OSError, SyntaxError, ValueError) as error:
                raise DataError(f"{path} is not a whole image ({error}): take it out of the folder") from None
        array = np.array(square, dtype=np.uint8)  # (size, size) or (size, size, 3)
        return torch.from_numpy(array.reshape(*self.shape[1:], self.shape[0])).permute(2, 0, 1)

    def _to_square(self, image: Any) -> Any:
        if self._transform is None:
            transforms = import_torchvision("transforms")
            size = self.shape[1]
            self._transform = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size)])
        return self._transform(image)


def _open(path: Path) -> Any:
    """A Pillow image whose header has been read.

    Raises:
        DataError: it is not an image, or has more than 8 bits a channel.
    """
    from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401  registers TIFF and WEBP

    try:
        open_file(path).close()  # a FIFO, for whose writer Pillow would wait, is refused
        image = Image.open(path, formats=FORMATS)  # without `formats`, a file that is none makes Pillow load 40 readers
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        detail = getattr(error, "strerror", None) or f"{path.stat().st_size} bytes" if path.exists() else "not there"
        raise DataError(f"{path} is not an image that can be read ({detail}): take it out of the folder") from None
    if image.mode not in MODES:
        image.close()
        raise DataError(
            f"{path} has pixels of Pillow's mode {image.mode}, more than 8 bits a channel: convert it to 8 bits"
        )
    return image


def load(data_dir: Path, image_size: int, channels: int) -> tuple[ImageFiles, ImageFiles]:
    """The training and the test set of a folder.

    Raises:
        DataError: no classes or only one, a class without images, a test class that the training set lacks, too few
            images to hold some out, or a file that is not an image.
    """
    if channels not in (1, 3):
        raise DataError(f"image files can be given with 1 or 3 channels, not {channels}")
    train_root = data_dir / "train"
    if train_root.is_dir():
        test_root = next((data_dir / name for name in TEST_NAMES if (data_dir / name).is_dir()), None)
        if test_root is None:
            raise DataError(
                f"{data_dir} has train/ and none of {', '.join(TEST_NAMES)}: add one to test on, or put "
                f"the class folders into {data_dir} itself"
            )
        classes, train = _list(train_root)
        _check_classes(train_root, classes, train)
        test_classes, found = _list(test_root)
        if unknown := sorted(set(test_classes) - set(classes)):
            raise DataError(f"{test_root} has classes that {train_root} lacks: {', '.join(unknown[:5])}")
        test = [(path, classes.index(test_classes[label])) for path, label in found]
    else:
        train_root = test_root = data_dir
        classes, files = _list(data_dir)
        _check_classes(data_dir, classes, files)
        train, test = _split(files, data_dir)
    train_set = ImageFiles(train_root, train, classes, image_size, channels)
    test_set = ImageFiles(test_root, test, classes, image_size, channels)
    train_set.check_headers()
    test_set.check_headers()
    return train_set, test_set


def _list(root: Path) -> tuple[list[str], Files]:
    """Class names in order, and (path under `root`, label) of every image, as torchvision's ImageFolder has them, but
    for what is hidden."""
    datasets = import_torchvision("datasets")
    extensions = datasets.folder.IMG_EXTENSIONS

    class Visible(datasets.ImageFolder):  # type: ignore[name-defined, misc]
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            names = [name for name in super().find_classes(directory)[0] if not name.startswith(".")]
            if not names:
                raise FileNotFoundError(f"Couldn't find any class folder in {directory} that is not hidden.")
            return names, {name: label for label, name in enumerate(names)}

    def shown(path: str) -> bool:
        return path.lower().endswith(extensions) and f"{os.sep}." not in path.removeprefix(os.fspath(root))

    try:
        found = Visible(os.fspath(root), is_valid_file=shown)
    except FileNotFoundError as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{root}: {reason} It needs a folder for each class with .jpg or .png files in it") from None
    except OSError as error:
        raise DataError(f"{root} cannot be read: {error.strerror or error}") from None
    return found.classes, [(os.path.relpath(path, root), label) for path, label in found.samples]


def _check_classes(root: Path, classes: Sequence[str], files: Files) -> None:
    """With one class the loss is 0 whatever the model does.

    Raises:
        DataError: there is only one.
    """
    if len(classes) > 1:
        return
    (name,) = classes
    images = f"{len(files)} image{'s' * (len(files) != 1)}"
    below = sorted(entry.name for entry in os.scandir(root / name) if entry.is_dir() and not entry.name.startswith("."))
    if below:
        names = ", ".join(below[:5]) + ", …" * (len(below) > 5)
        advice = f"if its subfolders ({names}) are, give --data_dir {root / name}"
    else:
        advice = "put the images of each class into a folder of its own"
    raise DataError(f"{root} has one class, {name}, with {images}: it takes at least 2 to learn from; {advice}")


def _split(files: Files, root: Path) -> tuple[Files, Files]:
    """Nine tenths and a tenth, by a hash of each path: a file keeps its side when others are added or removed."""
    if len(files) < 2:
        raise DataError(f"{root} has {len(files)} image{'s' * (len(files) != 1)}: it takes at least 2, to hold one out")
    hashes = {path: hashlib.sha256(os.fsencode(Path(path).as_posix())).digest() for path, _ in files}
    held_out = {path for path, digest in hashes.items() if int.from_bytes(digest[:4], "big") % 10 == 0}
    if not held_out or len(held_out) == len(files):  # so few that one side got nothing
        held_out = {min(hashes, key=hashes.__getitem__)}
    return [file for file in files if file[0] not in held_out], [file for file in files if file[0] in held_out]
