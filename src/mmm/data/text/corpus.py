"""Texts to train on: the Python standard library's own source, which is on every machine, or the user's files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmm.data.text.formats import reading
from mmm.data.text.tokens import TokenArray
from mmm.errors import DataError
from mmm.outside import open_file

if TYPE_CHECKING:
    from mmm.data.text.byte_tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """A text, split for training and validation.

    Attributes:
        train, validation: (tokens,) unsigned integers; of conversations `mmm.data.text.chat_tokens.ChatText`.
        source: where it was read from, for people. files: how many.
        sha256: of all bytes, training first, and of the tokenizer where that is not bytes; of a token file, of its
            manifest or of parts of it.
        unit: what a token is called. tokenizer: None for bytes, and where nobody knows.
        documents: gives (documents,) int64, the tokens before the end of each document, over training and validation;
            None where no document's end is known.
        bytes_per_token: of the text for validation; of a token file, of all its text. None where nobody knows.
        notes: what a user is to know of it.
    """

    train: Any
    validation: Any
    source: str
    files: int
    sha256: str
    unit: str = "bytes"
    tokenizer: Tokenizer | None = None
    documents: Callable[[], TokenArray] | None = None
    bytes_per_token: float | None = None
    notes: tuple[str, ...] = ()

    def describe(self) -> dict[str, object]:
        """What a run's record keeps of the data."""
        about = {
            "source": self.source,
            "files": self.files,
            f"train_{self.unit}": len(self.train),
            f"validation_{self.unit}": len(self.validation),
            "sha256": self.sha256,
        }
        if self.unit != "bytes":
            about["tokenizer"] = str(self.tokenizer or "unknown")
        return about


def _corpus(train: Sequence[bytes], validation: Sequence[bytes], source: str, files: int) -> Corpus:
    first = b"\n".join(train)
    second = b"\n".join(validation)
    return Corpus(
        train=np.frombuffer(first, np.uint8),
        validation=np.frombuffer(second, np.uint8),
        source=source,
        files=files,
        sha256=hashlib.sha256(first + second).hexdigest(),
        bytes_per_token=1.0,
    )


def standard_library(root: Path | None = None) -> Corpus:
    """The top-level modules of this Python's standard library: about 170 files, 4.7 MB.

    A tenth of the files, chosen by a hash of the name, is for validation: a module that a Python version adds does not
    change the split.

    Raises:
        DataError: this Python keeps no sources on disk.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train: list[bytes] = []
    validation: list[bytes] = []
    for path in sorted(root.glob("*.py")):
        if path.is_file():
            is_held_out = hashlib.sha256(path.name.encode()).digest()[0] % 10 == 0
            texts = validation if is_held_out else train
            texts.append(path.read_bytes())
    if not train or not validation:
        raise DataError(
            f"no standard library sources in {root} to train on: give a text with --text FILE, or use --dataset random"
        )
    version = sysconfig.get_python_version()
    return _corpus(train, validation, f"Python {version} standard library", len(train) + len(validation))


def read_text_files(paths: Sequence[Path], utf8: bool = False) -> Corpus:
    """Any files as text; the last tenth of each for validation.

    Args:
        utf8: the text has to be UTF-8, and that tenth begins with a full character; else it may be any bytes but NUL.

    Raises:
        DataError: a file is missing, is a folder, cannot be read, is empty, is binary, or is not UTF-8.
    """
    train = []
    validation = []
    for path in paths:
        name = f"--text {path}"
        with reading(name), open_file(path) as file:
            text = check_text(file.read(), name, utf8=utf8)
        if not text:
            raise DataError(f"{name}: the file is empty")
        end = len(text) - max(len(text) // 10, 1)
        while utf8 and end and text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
            end -= 1
        train.append(text[:end])
        validation.append(text[end:])
    return _corpus(train, validation, ", ".join(map(str, paths)), len(paths))


def check_text(text: bytes, name: object, begin: int = 0, utf8: bool = True) -> bytes:
    """The text itself.

    Args:
        begin: its first byte's place in the file. utf8: it has to be UTF-8.

    Raises:
        DataError: it is binary: it has a NUL byte; or it is not UTF-8.
    """
    place = text.find(b"\0")
    if place >= 0:
        raise DataError(f"{name} is binary: byte {begin + place} is NUL; give text, or a file of tokens (.bin, .idx)")
    if utf8:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}: the text is not UTF-8: {error.reason} at byte {begin + error.start}: convert it, such as by "
                f"iconv -f LATIN1 -t UTF-8"
            ) from None
    return text
