"""MNIST's file format, IDX: a header of big-endian words, then bytes. http://yann.lecun.com/exdb/mnist/

A file is::

    magic   0x00000801 for labels, 0x00000803 for images: two zeros, type 8 (unsigned byte), number of dims
    dims    that many 32-bit sizes
    data    as many bytes as the sizes multiply to

torchvision's reader takes neither .gz files nor a folder of any name, checks no file against its header, and its import
costs 2 s on every rank: this one needs NumPy alone.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mmm.data.download import File
from mmm.errors import DataError

LARGEST = 64 << 20  # bytes that a .gz of any size may become
RATIO = 100  # above that, times as many as it has; MNIST's images become 5 times as many
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


# Where they are offered, and of each file sha256 and bytes.
_MNIST = (
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    (
        ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
        ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
        ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
        ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
    ),
)
_FASHION_MNIST = (
    ("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",),
    (
        ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
        ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
        ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
        ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
    ),
)
PUBLISHED = {"mnist": _MNIST, "fashion_mnist": _FASHION_MNIST}


def files(name: str) -> tuple[File, ...]:
    """What there is to download of the data set `name`, a key of PUBLISHED."""
    mirrors, known = PUBLISHED[name]
    return tuple(
        File(f"{file}.gz", sha256, size, tuple(f"{mirror}{file}.gz" for mirror in mirrors))
        for file, (sha256, size) in zip(FILES, known, strict=True)
    )


def find(folder: Path, subfolders: tuple[str, ...]) -> Path | None:
    """The folder with the four files, plain or .gz: `folder` itself, or the first of its `subfolders`.

    Raises:
        DataError: there are some of the four, but no folder has all.
    """
    partly: tuple[Path, list[str]] | None = None
    for place in (folder, *(folder / name for name in subfolders)):
        missing = [name for name in FILES if _file(place, name) is None]
        if not missing:
            return place
        if len(missing) < len(FILES) and partly is None:
            partly = place, missing
    if partly:
        raise DataError(f"{partly[0]} lacks {', '.join(partly[1])} (with or without .gz): put all four files there")
    return None


def read_folder(folder: Path) -> Arrays:
    """Training images (n, rows, columns) and labels (n,), then the test ones, uint8.

    Raises:
        DataError: a file is not IDX or is truncated, or images and labels differ in number.
    """
    arrays = []
    for name in FILES:
        path = _file(folder, name)
        assert path is not None, f"{folder} lacks {name}: `find` has found it there"
        arrays.append(read(path, 3 if "images" in name else 1))
    train_images, train_labels, test_images, test_labels = arrays
    for images, labels, part in ((train_images, train_labels, "train"), (test_images, test_labels, "t10k")):
        if len(images) != len(labels):
            raise DataError(
                f"{folder}: {part} has {len(images)} images and {len(labels)} labels, which do not belong "
                f"together: fetch the files again"
            )
    return train_images, train_labels, test_images, test_labels


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if os.path.isfile(path)), None)


def read(path: Path, dims: int) -> np.ndarray:
    """One IDX file of unsigned bytes with that many dims, unpacked if it is gzip.

    Raises:
        DataError: it cannot be read, or is not such a file, or is shorter or longer than its header says.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            size = path.stat().st_size
            return _read(gzip.GzipFile(fileobj=file) if packed else file, path, dims, max(LARGEST, RATIO * size))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} ({path.stat().st_size} bytes) is not a whole gzip file ({error}): fetch it again"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _read(file: BinaryIO | gzip.GzipFile, path: Path, dims: int, most: int) -> np.ndarray:
    magic, header = bytes((0, 0, 8, dims)), 4 + 4 * dims
    head = file.read(header)
    if head[:4] != magic:
        raise DataError(
            f"{path} begins with {head[:4].hex() or 'nothing'}, not with {magic.hex()} as an IDX file "
            f"of {dims} dims does: fetch it again"
        )
    if len(head) < header:
        raise DataError(f"{path} has {len(head)} bytes, fewer than the {header} of its header: fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(head, ">u4", dims, offset=4))
    expected = header + int(np.prod(shape, dtype=object))
    sizes = "×".join(map(str, shape))
    if expected > most:
        raise DataError(
            f"{path}: its header ({sizes}) says {expected} bytes, more than {most}, the most it is taken for"
        )
    content = file.read(expected - header + 1)
    found = header + len(content)
    if found != expected:
        holds = found if found < expected else f"more than {expected}"
        raise DataError(f"{path} holds {holds} bytes, and its header ({sizes}) says {expected}: fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)
