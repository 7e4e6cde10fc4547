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
import zlib
from pathlib import Path

import numpy as np

from mmm.data.datasets.download import File
from mmm.data.torchvision_shim import import_torchvision
from mmm.errors import DataError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def files(torchvision_name: str) -> tuple[File, ...]:
    """The files to download of the data set that torchvision calls so."""
    dataset = getattr(import_torchvision("datasets"), torchvision_name)
    return tuple(
        File(name, md5, tuple(f"{mirror}{name}" for mirror in dataset.mirrors)) for name, md5 in dataset.resources
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
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read(path: Path, dims: int) -> np.ndarray:
    """One IDX file of unsigned bytes with that many dims, unpacked if it is gzip.

    Raises:
        DataError: it cannot be read, or is not such a file, or is shorter or longer than its header says.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} ({path.stat().st_size} bytes) is not a whole gzip file ({error}): fetch it again"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    magic, header = bytes((0, 0, 8, dims)), 4 + 4 * dims
    if content[:4] != magic:
        raise DataError(
            f"{path} begins with {content[:4].hex() or 'nothing'}, not with {magic.hex()} as an IDX file "
            f"of {dims} dims does: fetch it again"
        )
    if len(content) < header:
        raise DataError(f"{path} has {len(content)} bytes, fewer than the {header} of its header: fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dims, offset=4))
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        sizes = "×".join(map(str, shape))
        raise DataError(f"{path} holds {len(content)} bytes, and its header ({sizes}) says {expected}: fetch it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
