"""Files of images: IDX, CIFAR-10, folders."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from fuzz_files.kinds import Kind
from mmm.data.images.datasets import load_images
from mmm.data.images.idx import FILES
from mmm.data.images.torchvision_shim import import_torchvision
from support.cifar import expected_of, write_cifar


def _idx() -> dict[str, bytes]:
    numbers = np.random.RandomState(0)
    found = {}
    for name, many in zip(FILES, (6, 6, 3, 3), strict=True):
        shape = (many, 28, 28) if "images" in name else (many,)
        head = bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
        found[name] = head + numbers.randint(0, 10, shape).astype(np.uint8).tobytes()
    return found


def make_idx(folder: Path) -> None:
    for name, content in _idx().items():
        (folder / name).write_bytes(content)


def make_idx_gz(folder: Path) -> None:
    for name, content in _idx().items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))


def _read_images(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        data = load_images(name, folder, image_size=8 if name == "folder" else None)
        print(data.describe())
        every = [each.images(range(each.samples)) for each in (data.train, data.test)]
        return data, [each.pixels(range(each.samples)).numpy() for each in (data.train, data.test)], every

    return read


def wrong_idx(folder: Path, found: Any) -> str | None:
    _, (train, test), _ = found
    for pixels, name in ((train, FILES[0]), (test, FILES[2])):
        path = next(path for path in (folder / name, folder / f"{name}.gz") if path.is_file())
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        if content[:4] != b"\0\0\x08\x03" or struct.unpack(">3I", content[4:16]) != (len(pixels), *pixels.shape[2:]):
            return "a header says another shape"
        if pixels.tobytes() != content[16:]:
            return "other pixels"
    return None


def make_cifar(folder: Path) -> None:
    write_cifar(folder / "cifar-10-batches-py", 4)


def make_cifar_tar(folder: Path) -> None:
    write_cifar(folder / "made", 4)
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(folder / "made", "cifar-10-batches-py")
    for path in (folder / "made").iterdir():
        path.unlink()
    (folder / "made").rmdir()


def read_cifar(folder: Path) -> Any:
    with mock.patch.multiple(import_torchvision("datasets").CIFAR10, **_expected()):
        return _read_images("cifar10")(folder)


_published: dict[str, Any] = {}


def _expected() -> dict[str, Any]:
    """Names and sums of the batches that `write_cifar` writes: the same each time."""
    if not _published:
        with tempfile.TemporaryDirectory() as folder:
            write_cifar(Path(folder) / "c", 4)
            _published.update(expected_of(Path(folder) / "c"))
    return _published


def wrong_cifar(folder: Path, found: Any) -> str | None:
    pixels = np.concatenate([np.random.RandomState(n).randint(0, 256, (4, 3072)).astype(np.uint8) for n in range(5)])
    return None if found[1][0].tobytes() == pixels.tobytes() else "other pixels"


def own_cifar(name: str, content: bytes, random: Random) -> tuple[bytes, str] | None:
    """A pickle that starts a program, or a tar with members that leave the folder."""

    class Harm:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    if not name.endswith(".gz"):
        return pickle.dumps(Harm()), "starts a program"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for kind in random.sample(
            (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE), 2
        ):
            base = random.choice(("cifar-10-batches-py", "..", "/tmp", "./cifar-10-batches-py"))
            member = tarfile.TarInfo(f"{base}/data_batch_{random.randrange(1, 6)}")
            member.type, member.linkname = kind, random.choice(("/etc/passwd", "/dev/zero", "data_batch_1", "../x"))
            member.size = random.choice((0, 100)) if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return stream.getvalue(), "links, FIFOs and devices in a tar"


def make_images(folder: Path) -> None:
    from PIL import Image

    numbers = np.random.RandomState(0)
    for label, suffixes in (("cat", ("png", "jpg", "bmp", "ppm")), ("dog", ("png", "tiff", "webp", "jpg"))):
        (folder / label).mkdir()
        for number, suffix in enumerate(suffixes):
            image = Image.fromarray(numbers.randint(0, 256, (12, 10, 3)).astype(np.uint8))
            image.save(folder / label / f"{number}.{suffix}")


NUMPY = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
)
KINDS = (
    Kind("images-idx", make_idx, ("*ubyte",), _read_images("mnist"), wrong_idx, sparse=True),
    Kind("images-idx-gz", make_idx_gz, ("*.gz",), _read_images("mnist"), wrong_idx),
    Kind("images-cifar", make_cifar, ("*/*",), read_cifar, wrong_cifar, own=own_cifar, unpickles=NUMPY),
    Kind("images-cifar-tar", make_cifar_tar, ("*.gz",), read_cifar, wrong_cifar, own=own_cifar, unpickles=NUMPY),
    Kind("images-folder", make_images, ("*/*",), _read_images("folder")),
)
