"""A folder of image files, one subfolder a class, decoded by Pillow when they are read. One of::

data_dir/train/cat/*.jpg  data_dir/val/cat/*.jpg   two sets; ``val`` may be called ``validation`` or ``test``
data_dir/cat/*.jpg                                 one: a tenth is for testing, by a hash of each path

torchvision's ImageFolder lists the files. What is hidden (its name begins with a dot) is passed over:
``.ipynb_checkpoints``, ``._0.png`` of macOS.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from functools import cached_property
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
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP", "GIF")  # no other reader of Pillow is tried: EPS runs programs
DEEP_MODES = ("I", "F")  # Pillow's modes with more than 8 bits a channel begin with these
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

    def pixels(self, indices: Indices) -> Tensor:
        if not len(indices):
            return torch.empty((0, *self.shape), dtype=torch.uint8)
        return torch.stack([self._read(self.root / os.fsdecode(self._paths[index])) for index in indices])

    def labels(self, indices: Indices) -> Tensor:
        return self._labels[torch.as_tensor(np.asarray(indices, dtype=np.int64))]

    def digest(self) -> str:
        """Of the paths and labels, since reading every file would take as long as an epoch."""
        lines = (b"%s\t%d\n" % pair for pair in zip(self._paths.tolist(), self._labels.tolist(), strict=True))
        return hashlib.sha256(b"".join(lines)).hexdigest()

    def _read(self, path: Path) -> Tensor:
        """(channels, size, size) uint8. Raises DataError: it is no image that can be read."""
        from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401  registers TIFF and WEBP

        try:
            with open_file(path) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, about palettes with transparency
                image = Image.open(file, formats=FORMATS)
                if image.mode.startswith(DEEP_MODES):
                    raise DataError(f"{path} has more than 8 bits a channel (mode {image.mode}): convert it to 8 bits")
                converted = image.convert("RGB" if self.shape[0] == 3 else "L")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} is not an image that can be read ({error}): take it out of the folder") from None
        return self._transform(converted)

    @cached_property
    def _transform(self) -> Any:
        transforms = import_torchvision("transforms")
        size = self.shape[1]
        return transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.PILToTensor()])


def load(data_dir: Path, image_size: int, channels: int) -> tuple[ImageFiles, ImageFiles]:
    """The training and the test set of a folder.

    Raises:
        DataError: no classes or only one, a class without images, a test class that the training set lacks, or too few
            images to hold some out.
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
        _check_classes(train_root, classes)
        test_classes, test = _list(test_root)
        unknown = sorted(set(test_classes) - set(classes))
        if unknown:
            raise DataError(f"{test_root} has classes that {train_root} lacks: {', '.join(unknown[:5])}")
        # A test set may lack a class, so its labels are other numbers.
        test = [(path, classes.index(test_classes[label])) for path, label in test]
    else:
        train_root = test_root = data_dir
        classes, files = _list(data_dir)
        _check_classes(data_dir, classes)
        train, test = _split(files, data_dir)
    train_set = ImageFiles(train_root, train, classes, image_size, channels)
    test_set = ImageFiles(test_root, test, classes, image_size, channels)
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

    def is_shown(path: str) -> bool:
        return path.lower().endswith(extensions) and f"{os.sep}." not in path.removeprefix(os.fspath(root))

    try:
        listed = Visible(os.fspath(root), is_valid_file=is_shown)
    except FileNotFoundError as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{root}: {reason} It needs a folder for each class with .jpg or .png files in it") from None
    except OSError as error:
        raise DataError(f"{root} cannot be read: {error.strerror or error}") from None
    return listed.classes, [(os.path.relpath(path, root), label) for path, label in listed.samples]


def _check_classes(root: Path, classes: Sequence[str]) -> None:
    """With one class the loss is 0 whatever the model does.

    Raises:
        DataError: there is only one.
    """
    if len(classes) > 1:
        return
    name = classes[0]
    raise DataError(
        f"{root} has one class, {name}: it takes at least 2 to learn from; put the images of each class into a folder "
        f"of its own, or, if the folders in {name} are the classes, give --data_dir {root / name}"
    )


def _split(files: Files, root: Path) -> tuple[Files, Files]:
    """Nine tenths and a tenth, by a hash of each path: a file keeps its side when others are added or removed."""
    if len(files) < 2:
        raise DataError(f"{root} has {len(files)} images: it takes at least 2, to hold one out")
    hashes = {path: hashlib.sha256(os.fsencode(Path(path).as_posix())).digest() for path, _ in files}
    held_out = {path for path, digest in hashes.items() if int.from_bytes(digest[:4], "big") % 10 == 0}
    if not held_out or len(held_out) == len(files):  # so few that one side got nothing
        held_out = {min(hashes, key=hashes.__getitem__)}
    train = [file for file in files if file[0] not in held_out]
    test = [file for file in files if file[0] in held_out]
    return train, test
