"""A folder of image files with one subfolder per class, decoded by Pillow when they are read. It has one of two forms::

data_dir/train/cat/*.jpg  data_dir/val/cat/*.jpg   two sets; ``val`` may be called ``validation`` or ``test``
data_dir/cat/*.jpg                                 one set; a tenth of it is for testing, by a hash of each path

Hidden files and folders (their names begin with a dot) are skipped: ``.ipynb_checkpoints``, ``._0.png`` of macOS. So
are files whose names do not end like an image's; a note counts those. An image is turned as its EXIF data say,
transparent pixels are laid on white, and an animation gives its first frame.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmm.data.images.image_set import ImageSet, Indices, Values
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.data.text.formats import reading
from mmm.errors import DataError
from mmm.outside import open_file
from mmm.runtime.log import say_once

if TYPE_CHECKING:
    from PIL.Image import Image

# Mean and standard deviation.
IMAGENET: tuple[Values, Values] = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)
GREY: tuple[Values, Values] = (
    (0.5,),
    (0.25,),
)
TEST_NAMES = ("val", "validation", "test")
# Pillow tries none of its other readers: the one for EPS runs programs.
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP", "GIF")
# How Pillow's modes with more than 8 bits per channel begin.
DEEP_MODES = ("I", "F")


class ImageFiles(ImageSet):
    """Image files, decoded on reading: shorter side resized to `image_size`, centre crop, grey or colour.

    Args:
        root: folder that the paths are relative to.
        paths: the files; a path's first folder is its class.
        classes: name of each label.
        image_size: height and width to return, in pixels.
        channels: 1 for grey or 3 for colour.
    """

    in_memory = False

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        classes: Sequence[str],
        image_size: int,
        channels: int,
    ) -> None:
        self.root = root
        self.classes = tuple(classes)
        self.samples = len(paths)
        self.shape = (channels, image_size, image_size)
        self.mean, self.std = IMAGENET if channels == 3 else GREY
        # An array of bytes takes a quarter of the memory of a list of str.
        self._paths = np.array([os.fsencode(path) for path in paths])
        label_of = {name: label for label, name in enumerate(classes)}
        labels = [label_of[_class_of(path)] for path in paths]
        self.labels = torch.tensor(labels, dtype=torch.int64)

    def pixels(self, indices: Indices) -> Tensor:
        if not len(indices):
            return torch.empty((0, *self.shape), dtype=torch.uint8)
        images = []
        for index in indices:
            path = os.fsdecode(self._paths[index])
            images.append(self._read(self.root / path))
        return torch.stack(images)

    def digest(self) -> str:
        """SHA-256 of the paths and labels. Reading every file would take as long as an epoch."""
        digest = hashlib.sha256()
        paths = self._paths.tolist()
        labels = self.labels.tolist()
        for path, label in zip(paths, labels, strict=True):
            digest.update(b"%s\t%d\n" % (path, label))
        return digest.hexdigest()

    def _read(self, path: Path) -> Tensor:
        """Read a file: (channels, size, size) uint8. Raises DataError: it is not an image that can be read."""
        # The last two imports register the readers of TIFF and WEBP.
        from PIL import Image, ImageOps, TiffImagePlugin, WebPImagePlugin  # noqa: F401

        mode = "RGB" if self.shape[0] == 3 else "L"
        try:
            with open_file(path) as file, warnings.catch_warnings():
                # Pillow warns about palettes with transparency.
                warnings.simplefilter("ignore")
                image = Image.open(file, formats=FORMATS)
                if image.mode.startswith(DEEP_MODES):
                    raise DataError(f"{path} has more than 8 bits a channel (mode {image.mode}): convert it to 8 bits")
                turned = ImageOps.exif_transpose(image)
                converted = _opaque(turned, path).convert(mode)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} is not an image that can be read ({error}): take it out of the folder") from None
        return self._transform(converted)

    @cached_property
    def _transform(self) -> Any:
        transforms = import_torchvision("transforms")
        size = self.shape[1]
        return transforms.Compose(
            [
                transforms.Resize(size),
                transforms.CenterCrop(size),
                transforms.PILToTensor(),
            ]
        )


def _opaque(image: Image, path: Path) -> Image:
    """Lay an image on white where it is transparent. The first one in which that happens is logged."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    layered = image.convert("RGBA")
    lowest_alpha, _ = layered.getchannel("A").getextrema()
    # 255: opaque everywhere.
    if lowest_alpha == 255:
        return image
    say_once(f"images have transparent pixels, which are laid on white; the first is {path}")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, layered)


def load(data_dir: Path, image_size: int, channels: int) -> tuple[ImageFiles, ImageFiles, str]:
    """Load the training set and the test set of a folder, and a note about the files that are skipped.

    Raises:
        DataError: there are fewer than two classes, a class has no images, or the test set has a class that the
            training set lacks.
    """
    # Files that are skipped.
    skipped: list[str] = []
    train_root = data_dir / "train"
    if train_root.is_dir():
        test_roots = [data_dir / name for name in TEST_NAMES if (data_dir / name).is_dir()]
        if not test_roots:
            raise DataError(f"{data_dir} has train/ and none of {', '.join(TEST_NAMES)}: add one to test on")
        test_root = test_roots[0]
        train = _images_in(train_root, skipped)
        test = _images_in(test_root, skipped)
        classes = sorted(set(map(_class_of, train)))
    else:
        train_root = data_dir
        test_root = data_dir
        paths = _images_in(data_dir, skipped)
        train, test = _split(paths)
        # A class may have all of its few images in the test set.
        classes = sorted(set(map(_class_of, paths)))
    test_classes = set(map(_class_of, test))
    unknown = sorted(test_classes - set(classes))
    if len(classes) < 2 or unknown:
        raise DataError(
            f"{train_root} has images of {len(classes)} classes {classes[:5]}, and {test_root} of other classes "
            f"{unknown[:5]}: make a folder for each of 2 classes or more"
        )
    note = ""
    if skipped:
        note = f"{len(skipped)} files of {data_dir} are skipped, which are no images in a class, such as {skipped[0]}"
    train_set = ImageFiles(train_root, train, classes, image_size, channels)
    test_set = ImageFiles(test_root, test, classes, image_size, channels)
    return train_set, test_set, note


def _class_of(path: str) -> str:
    return path.partition(os.sep)[0]


def _images_in(root: Path, skipped: list[str]) -> list[str]:
    """List the paths of all images under a root, sorted, class by class.

    Args:
        skipped: receives the other files.

    Raises:
        DataError: a class has no images.
    """
    from PIL import Image

    extensions = Image.registered_extensions()
    endings = {ending for ending, name in extensions.items() if name in FORMATS}
    paths: list[str] = []
    with reading(root):
        names = [name for name in os.listdir(root) if not name.startswith(".")]
    for name in sorted(names):
        class_folder = root / name
        if not class_folder.is_dir():
            skipped.append(name)
            continue
        n_before = len(paths)
        for folder, _, file_names in sorted(os.walk(class_folder, followlinks=True)):
            for file_name in sorted(file_names):
                path = os.path.relpath(os.path.join(folder, file_name), root)
                suffix = os.path.splitext(path)[1].lower()
                # A hidden file or folder.
                if f"{os.sep}." in path:
                    continue
                if suffix in endings:
                    paths.append(path)
                else:
                    skipped.append(path)
        if len(paths) == n_before:
            raise DataError(f"{class_folder} has no image: a class needs .jpg or .png files, or others that are read")
    return paths


def _split(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into nine tenths and a tenth by a hash of each path: other files that come or go do not move a file."""
    hashes = {path: hashlib.sha256(os.fsencode(Path(path).as_posix())).digest() for path in paths}
    test = [path for path in paths if int.from_bytes(hashes[path][:4], "big") % 10 == 0]
    # There are so few files that one side got none.
    if len(test) in (0, len(paths)):
        test = [min(paths, key=hashes.__getitem__)] if paths else []
    # A set: looking up a path in a list takes as long as the list.
    in_test = set(test)
    train = [path for path in paths if path not in in_test]
    return train, test
