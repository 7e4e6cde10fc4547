"""A folder of image files, one subfolder a class, decoded by Pillow when they are read. One of::

data_dir/train/cat/*.jpg  data_dir/val/cat/*.jpg   two sets; ``val`` may be called ``validation`` or ``test``
data_dir/cat/*.jpg                                 one: a tenth is for testing, by a hash of each path

What is hidden (its name begins with a dot) is passed over: ``.ipynb_checkpoints``, ``._0.png`` of macOS. So are files
whose names do not end as an image's, which a note counts. An image is turned as its EXIF says, transparent pixels are
laid on white, and of an animation the first frame is read.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter
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

IMAGENET: tuple[Values, Values] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean, standard deviation
GREY: tuple[Values, Values] = ((0.5,), (0.25,))
TEST_NAMES = ("val", "validation", "test")
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP", "GIF")  # no other reader of Pillow is tried: EPS runs programs
DEEP_MODES = ("I", "F")  # Pillow's modes with more than 8 bits a channel begin with these


class ImageFiles(ImageSet):
    """Files decoded on reading: shorter side resized to `image_size`, centre crop, converted to grey or colour.

    Args:
        root: what the paths are under.
    """

    in_memory = False

    def __init__(
        self, root: Path, paths: Sequence[str], classes: Sequence[str], image_size: int, channels: int
    ) -> None:
        self.root = root
        self.classes = tuple(classes)
        self.samples = len(paths)
        self.shape = (channels, image_size, image_size)
        self.mean, self.std = IMAGENET if channels == 3 else GREY
        self._paths = np.array([os.fsencode(path) for path in paths])  # a quarter of the memory of str
        label_of = {name: label for label, name in enumerate(classes)}
        self.labels = torch.tensor([label_of[_class_of(path)] for path in paths], dtype=torch.int64)

    def pixels(self, indices: Indices) -> Tensor:
        if not len(indices):
            return torch.empty((0, *self.shape), dtype=torch.uint8)
        return torch.stack([self._read(self.root / os.fsdecode(self._paths[index])) for index in indices])

    def digest(self) -> str:
        """Of the paths and labels, since reading every file would take as long as an epoch."""
        digest = hashlib.sha256()
        for path, label in zip(self._paths.tolist(), self.labels.tolist(), strict=True):
            digest.update(b"%s\t%d\n" % (path, label))
        return digest.hexdigest()

    def _read(self, path: Path) -> Tensor:
        """(channels, size, size) uint8. Raises DataError: it is no image that can be read."""
        from PIL import Image, ImageOps, TiffImagePlugin, WebPImagePlugin  # noqa: F401  registers TIFF and WEBP

        try:
            with open_file(path) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, about palettes with transparency
                image = Image.open(file, formats=FORMATS)
                if image.mode.startswith(DEEP_MODES):
                    raise DataError(f"{path} has more than 8 bits a channel (mode {image.mode}): convert it to 8 bits")
                opaque = _opaque(ImageOps.exif_transpose(image), path)
                converted = opaque.convert("RGB" if self.shape[0] == 3 else "L")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} is not an image that can be read ({error}): take it out of the folder") from None
        return self._transform(converted)

    @cached_property
    def _transform(self) -> Any:
        transforms = import_torchvision("transforms")
        size = self.shape[1]
        return transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.PILToTensor()])


def _opaque(image: Image, path: Path) -> Image:
    """The image, laid on white where it is transparent, which is said of the first one."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    layered = image.convert("RGBA")
    if layered.getchannel("A").getextrema()[0] == 255:
        return image
    say_once(f"images have transparent pixels, which are laid on white; the first is {path}")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), layered)


def load(data_dir: Path, image_size: int, channels: int) -> tuple[ImageFiles, ImageFiles, str]:
    """The training and the test set of a folder, and a note of the files that are passed over.

    Raises:
        DataError: no classes or only one, a class without images, a test class that the training set lacks, or too few
            images to hold some out.
    """
    passed_over: Counter[str] = Counter()
    train_root = data_dir / "train"
    if train_root.is_dir():
        test_roots = [data_dir / name for name in TEST_NAMES if (data_dir / name).is_dir()]
        if not test_roots:
            raise DataError(f"{data_dir} has train/ and none of {', '.join(TEST_NAMES)}: add one to test on")
        test_root = test_roots[0]
        known = train = _images_in(train_root, passed_over)
        test = _images_in(test_root, passed_over)
    else:
        train_root = test_root = data_dir
        known = _images_in(data_dir, passed_over)
        train, test = _split(known)
    classes = sorted(set(map(_class_of, known)))
    unknown = sorted(set(map(_class_of, test)) - set(classes))
    if len(classes) < 2 or unknown:
        raise DataError(
            f"{train_root} has images of {len(classes)} classes {classes[:5]}, and {test_root} of other classes "
            f"{unknown[:5]}: it takes a folder for each of 2 classes or more"
        )
    note = ""
    if passed_over:
        endings = ", ".join(f"{count} {suffix or 'without an ending'}" for suffix, count in passed_over.most_common(5))
        note = f"{passed_over.total()} files of {data_dir} are passed over: {endings}"
    train_set = ImageFiles(train_root, train, classes, image_size, channels)
    return train_set, ImageFiles(test_root, test, classes, image_size, channels), note


def _class_of(path: str) -> str:
    return path.partition(os.sep)[0]


def _images_in(root: Path, passed_over: Counter[str]) -> list[str]:
    """The paths of all images under a root, by class, in order. Raises DataError: a class has none."""
    from PIL import Image

    endings = {ending for ending, name in Image.registered_extensions().items() if name in FORMATS}
    paths: list[str] = []
    with reading(root):
        names = sorted(name for name in os.listdir(root) if not name.startswith("."))
    for name in names:
        if not (root / name).is_dir():
            passed_over[f"{Path(name).suffix.lower()} in no class"] += 1
            continue
        before = len(paths)
        for folder, _, file_names in sorted(os.walk(root / name, followlinks=True)):
            for file_name in sorted(file_names):
                path = os.path.relpath(os.path.join(folder, file_name), root)
                suffix = os.path.splitext(path)[1].lower()
                if f"{os.sep}." in path:  # hidden
                    continue
                if suffix in endings:
                    paths.append(path)
                else:
                    passed_over[suffix] += 1
        if len(paths) == before:
            raise DataError(f"{root / name} has no image: a class needs .jpg or .png files, or others that are read")
    return paths


def _split(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Nine tenths and a tenth, by a hash of each path: a file keeps its side when others are added or removed."""
    by_hash = {hashlib.sha256(os.fsencode(Path(path).as_posix())).digest(): path for path in paths}
    held_out = [digest for digest in by_hash if int.from_bytes(digest[:4], "big") % 10 == 0]
    if len(held_out) in (0, len(by_hash)):  # so few that one side got nothing
        held_out = sorted(by_hash)[:1]
    test = {by_hash[digest]: None for digest in held_out}
    return [path for path in paths if path not in test], list(test)
