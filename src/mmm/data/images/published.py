"""MNIST, Fashion-MNIST and CIFAR-10 as they are published: each file is known by its md5."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmm.data.cache import cache_folder, download_once, fetch
from mmm.data.images.image_set import ImageData, ImagesInMemory, Values
from mmm.data.text.formats import reading
from mmm.errors import DataError
from mmm.outside import read_file

Arrays = tuple[np.ndarray, np.ndarray]  # images (n, channels, height, width) uint8, labels (n,)
CIFAR_ARCHIVE = "cifar-10-python.tar.gz"
CIFAR_ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR_FOLDER = "cifar-10-batches-py"  # what is in the archive


@dataclass(frozen=True)
class Published:
    """A data set that others publish.

    Attributes:
        title: name of the data set, and of the folder in which torchvision keeps it.
        server: address of the folder with its files; ends with a slash.
        files: md5 of each file, by name.
        size: height and width of an image in pixels.
        mean, std: of each channel of the training images, for pixels from 0 to 1.
        classes: name of each label 0, 1, ….
    """

    title: str
    server: str
    files: dict[str, str]
    size: int
    mean: Values
    std: Values
    classes: tuple[str, ...]


MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
MNIST_MD5 = """
    f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432
    9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c
"""
FASHION_MD5 = """
    8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe
    bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310
"""
CIFAR_FILES = [f"{CIFAR_FOLDER}/data_batch_{batch}" for batch in range(1, 6)] + [f"{CIFAR_FOLDER}/test_batch"]
CIFAR_FILES_MD5 = """
    c99cafc152244af753f735de768cd75f d4bba439e000b95fd0a9bffe97cbabec 54ebc095f3ab1f0389bbae665268c751
    634d18415352ddfa80567beed471001a 482c414d41f54cd18b22e5b47cb7c3cb 40351d587109b95175f43aff81a1287e
"""
DIGITS = "0 - zero, 1 - one, 2 - two, 3 - three, 4 - four, 5 - five, 6 - six, 7 - seven, 8 - eight, 9 - nine"
CLOTHES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
THINGS = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"
PUBLISHED = {
    "mnist": Published(
        title="MNIST",
        server="https://ossci-datasets.s3.amazonaws.com/mnist/",
        files=dict(zip(MNIST_FILES, MNIST_MD5.split(), strict=True)),
        size=28,
        mean=(0.1307,),
        std=(0.3081,),
        classes=tuple(DIGITS.split(", ")),
    ),
    "fashion_mnist": Published(
        title="FashionMNIST",
        server="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        files=dict(zip(MNIST_FILES, FASHION_MD5.split(), strict=True)),
        size=28,
        mean=(0.2860,),
        std=(0.3530,),
        classes=tuple(CLOTHES.split(", ")),
    ),
    "cifar10": Published(
        title="CIFAR10",
        server="https://www.cs.toronto.edu/~kriz/",
        files=dict(zip(CIFAR_FILES, CIFAR_FILES_MD5.split(), strict=True)),
        size=32,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        classes=tuple(THINGS.split(", ")),
    ),
}


def load(name: str, folder: Path | None, image_size: int | None, channels: int | None) -> ImageData:
    """Read a published data set.

    Args:
        folder: where its files are; only read. None: the cache, into which it is downloaded once.

    Raises:
        Refused: it is not in the cache and cannot be downloaded.
        DataError: `folder` lacks the data, or a file is damaged.
    """
    published = PUBLISHED[name]
    download = _download_files
    arrays_of = _mnist_arrays
    if name == "cifar10":
        download = _download_cifar
        arrays_of = _cifar_arrays
    if folder is None:
        folder = cache_folder() / name
        download_once(folder, lambda partial: download(published, partial))
    train, test = (
        ImagesInMemory(*arrays, published.classes, published.mean, published.std, image_size, channels)
        for arrays in arrays_of(_contents(published, folder))
    )
    return ImageData(train, test, name, name, str(folder))


def _download_files(published: Published, folder: Path) -> None:
    for name, md5 in published.files.items():
        (folder / name).write_bytes(fetch(published.server + name, "md5", md5))


def _download_cifar(published: Published, folder: Path) -> None:
    packed = fetch(published.server + CIFAR_ARCHIVE, "md5", CIFAR_ARCHIVE_MD5)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def _contents(published: Published, folder: Path) -> list[bytes]:
    """The content of each file, from `folder` or from where torchvision keeps them in it.

    Raises:
        DataError: a file is missing, or is not the published one.
    """
    for place in (folder, folder / published.title / "raw"):
        if all((place / name).is_file() for name in published.files):
            return [_checked(place / name, md5) for name, md5 in published.files.items()]
    raise DataError(f"{folder} does not hold {published.title}: it needs {', '.join(published.files)}")


def _checked(path: Path, md5: str) -> bytes:
    with reading(path):
        content = read_file(path)
    own = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if own != md5:
        raise DataError(
            f"{path} ({len(content)} bytes) has md5 {own}, not {md5} as published: it is damaged, or another file"
        )
    return content


def _mnist_arrays(contents: list[bytes]) -> tuple[Arrays, Arrays]:
    """To train on, and to test on. The headers have 16 and 8 bytes: each file is the published one, by its md5."""
    files = [gzip.decompress(content) for content in contents]
    images = [np.frombuffer(content, np.uint8, offset=16).reshape(-1, 1, 28, 28) for content in files[::2]]
    labels = [np.frombuffer(content, np.uint8, offset=8) for content in files[1::2]]
    return (images[0], labels[0]), (images[1], labels[1])


def _cifar_arrays(contents: list[bytes]) -> tuple[Arrays, Arrays]:
    """To train on, and to test on. A pickle may run code: these are the published ones, by their md5."""
    batches = [pickle.loads(content, encoding="latin1") for content in contents]
    images = [batch["data"].reshape(-1, 3, 32, 32) for batch in batches]
    labels = [np.array(batch["labels"]) for batch in batches]
    train = np.concatenate(images[:-1]), np.concatenate(labels[:-1])
    return train, (images[-1], labels[-1])
