"""Text as bytes: the Python standard library's own source, which is on every machine, or the user's files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmm.errors import DataError

BYTES = 256  # the vocabulary: one token a byte


@dataclass(frozen=True)
class Corpus:
    """A text, split for training and validation.

    Attributes:
        train, validation: (bytes,) uint8.
        source: where it was read from, for people. files: how many. sha256: of all bytes, training first.
    """

    train: np.ndarray
    validation: np.ndarray
    source: str
    files: int
    sha256: str

    def describe(self) -> dict[str, object]:
        """What a run's record keeps of the data."""
        return {
            "source": self.source,
            "files": self.files,
            "train_bytes": len(self.train),
            "validation_bytes": len(self.validation),
            "sha256": self.sha256,
        }


def _corpus(train: Iterable[bytes], validation: Iterable[bytes], source: str, files: int) -> Corpus:
    first, second = (np.frombuffer(b"\n".join(texts), dtype=np.uint8) for texts in (train, validation))
    digest = hashlib.sha256(first.data)
    digest.update(second.data)
    return Corpus(first, second, source, files, digest.hexdigest())


def standard_library(root: Path | None = None) -> Corpus:
    """The top-level modules of this Python's standard library: about 170 files, 4.7 MB.

    A tenth of the files, chosen by a hash of the name, is for validation: a module that a Python version adds does not
    change the split.

    Raises:
        DataError: this Python keeps no sources on disk.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.glob("*.py") if path.is_file())
    held_out = {path for path in files if hashlib.sha256(path.name.encode()).digest()[0] % 10 == 0}
    texts = {path: path.read_bytes() for path in files}
    train = [texts[path] for path in files if path not in held_out]
    validation = [texts[path] for path in files if path in held_out]
    if not train or not validation:
        raise DataError(
            f"no standard library sources in {root} to train on: give a text with --text FILE, or use --dataset random"
        )
    version = sysconfig.get_python_version()
    return _corpus(train, validation, f"Python {version} standard library", len(files))


def read_text_files(paths: Sequence[Path]) -> Corpus:
    """Any files as text; the last tenth of each for validation.

    Raises:
        DataError: a file is missing, is a folder, cannot be read, or is empty.
    """
    train, validation = [], []
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"--text {path}: {error.strerror or error}") from None
        if not text:
            raise DataError(f"--text {path}: the file is empty")
        end = len(text) - max(len(text) // 10, 1)
        train.append(text[:end])
        validation.append(text[end:])
    return _corpus(train, validation, ", ".join(str(path) for path in paths), len(paths))
