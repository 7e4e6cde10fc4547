"""CIFAR-10 (Krizhevsky 2009): six pickled batches of 10,000 images. Each is checked against its md5, then read.

torchvision's reader unpacks the tar.gz beside it; this one reads it in place, since a data folder is never written to.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import zlib
from pathlib import Path

import numpy as np

from mmm.data.download import File
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.errors import DataError

LARGEST = 64 << 20  # bytes; a batch has half as many
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def files() -> tuple[File, ...]:
    """What there is to download."""
    name = "cifar-10-python.tar.gz"
    sha256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
    return (File(name, sha256, 170_498_071, (f"https://www.cs.toronto.edu/~kriz/{name}",)),)


def find(folder: Path) -> Path | None:
    """``cifar-10-batches-py``, or the tar.gz of it: `folder` itself, or in it."""
    cifar = import_torchvision("datasets").CIFAR10
    first = cifar.train_list[0][0]
    for place in (folder, folder / cifar.base_folder, folder / "cifar10" / cifar.base_folder):
        if os.path.isfile(place / first):
            return place
    for place in (folder / cifar.filename, folder / "cifar10" / cifar.filename):
        if os.path.isfile(place):
            return place
    return None


def read(place: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images (n, 3, 32, 32) uint8 and labels (n,), then the test ones.

    Raises:
        DataError: a batch is missing, or its md5 is not the published one: a pickle can run any code, so nothing else
            is unpickled.
    """
    cifar = import_torchvision("datasets").CIFAR10
    wanted: dict[str, str] = dict([*cifar.train_list, *cifar.test_list])
    contents = _from_tar(place, cifar.base_folder, wanted) if place.is_file() else _from_folder(place, wanted)
    batches = {}
    for name, md5 in wanted.items():
        found = hashlib.md5(contents[name], usedforsecurity=False).hexdigest()
        if found != md5:
            raise DataError(
                f"{place}: {name} ({len(contents[name])} bytes) has md5 {found}, not {md5} as published: fetch it again"
            )
        batches[name] = pickle.loads(contents.pop(name), encoding="latin1")
    arrays = []
    for listed in (cifar.train_list, cifar.test_list):
        arrays.append(np.concatenate([batches[name]["data"] for name, _ in listed]).reshape(-1, 3, 32, 32))
        arrays.append(np.concatenate([batches[name]["labels"] for name, _ in listed]))
    return arrays[0], arrays[1], arrays[2], arrays[3]


def _from_folder(folder: Path, wanted: dict[str, str]) -> dict[str, bytes]:
    missing = [name for name in wanted if not os.path.isfile(folder / name)]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}: put all of {', '.join(wanted)} there")
    try:
        return {name: (folder / name).read_bytes() for name in wanted}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None


def _from_tar(path: Path, base: str, wanted: dict[str, str]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as tar:
            for member in tar:
                folder, _, name = member.name.removeprefix("./").partition("/")
                if member.size > LARGEST:
                    raise DataError(f"{path}: {member.name} has {member.size} bytes, more than any file of CIFAR-10")
                if (
                    member.isfile()
                    and folder == base
                    and name in wanted
                    and (stream := tar.extractfile(member)) is not None
                ):
                    contents[name] = stream.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        size = path.stat().st_size
        raise DataError(f"{path} ({size} bytes) is not a whole tar.gz file ({error}): fetch it again") from None
    if missing := [name for name in wanted if name not in contents]:
        raise DataError(f"{path} lacks {', '.join(f'{base}/{name}' for name in missing)}: fetch it again")
    return contents
