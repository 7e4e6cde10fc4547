"""Texts to train on: the Python standard library's own source, which is on every machine, or the user's files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmm.data.text.tokens import TokenArray
from mmm.errors import DataError

if TYPE_CHECKING:
    from mmm.data.text.byte_tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """A text, split for training and validation.

    Attributes:
        train, validation: (tokens,) unsigned integers.
        source: where it was read from, for people. files: how many.
        sha256: of all bytes, training first, and of the tokenizer where that is not bytes; of a token file, of its
            manifest or of parts of it.
        unit: what a token is called. tokenizer: None for bytes, and where nobody knows.
        documents: gives (documents,) int64, the tokens before the end of each document, over training and validation;
            None where no document's end is known.
        is_chats: a target is a token of an answer (`mmm.data.text.chat_tokens`).
        bytes_per_token: of the text for validation; of a token file, of all its text. None where nobody knows.
    """

    train: TokenArray
    validation: TokenArray
    source: str
    files: int
    sha256: str
    unit: str = "bytes"
    tokenizer: Tokenizer | None = None
    documents: Callable[[], TokenArray] | None = None
    bytes_per_token: float | None = None
    is_chats: bool = False

    def describe(self) -> dict[str, object]:
        """What a run's record keeps of the data."""
        about = {
            "source": self.source,
            "files": self.files,
            f"train_{self.unit}": len(self.train),
            f"validation_{self.unit}": len(self.validation),
            "sha256": self.sha256,
        }
        return about if self.unit == "bytes" else about | {"tokenizer": str(self.tokenizer or "unknown")}


def _corpus(train: Iterable[bytes], validation: Iterable[bytes], source: str, files: int) -> Corpus:
    first, second = (np.frombuffer(b"\n".join(texts), dtype=np.uint8) for texts in (train, validation))
    digest = hashlib.sha256(first.data)
    digest.update(second.data)
    return Corpus(first, second, source, files, digest.hexdigest(), bytes_per_token=1.0)


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


def read_text_files(
    paths: Sequence[Path], between_characters: bool = False, check: Callable[[Path], object] = lambda path: None
) -> Corpus:
    """Any files as text; the last tenth of each for validation.

    Args:
        between_characters: begin that tenth with a full character, which may have several bytes.
        check: raises DataError for a file that is not to be read as text, such as `refuse_other_formats`.

    Raises:
        DataError: a file is missing, is a folder, cannot be read, is empty, is binary, or is refused by `check`.
    """
    train, validation = [], []
    for path in paths:
        try:
            check_is_file(path, f"--text {path}")
            check(path)
            text = check_text(path.read_bytes(), f"--text {path}")
        except OSError as error:
            raise DataError(f"--text {path}: {error.strerror or error}") from None
        if not text:
            raise DataError(f"--text {path}: the file is empty")
        if between_characters:
            check_utf8(text, f"--text {path}")
        end = len(text) - max(len(text) // 10, 1)
        while between_characters and end and text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
            end -= 1
        train.append(text[:end])
        validation.append(text[end:])
    return _corpus(train, validation, ", ".join(str(path) for path in paths), len(paths))


def check_is_file(path: Path, name: object = None) -> None:
    """Raises DataError for a folder, a device, or a FIFO: what is read of that once is gone. name: for messages."""
    if path.exists() and not path.is_file():
        raise DataError(f"{name or path} is no file")


def check_text(text: bytes, name: object, begin: int = 0) -> bytes:
    """The text itself.

    Args:
        begin: its first byte's place in the file.

    Raises:
        DataError: it is binary: it has a NUL byte.
    """
    if (place := text.find(b"\0")) >= 0:
        raise DataError(f"{name} is binary: byte {begin + place} is NUL; give text, or a file of tokens (.bin, .idx)")
    return text


def check_utf8(text: bytes, name: object, begin: int = 0, advice: str = ", or use --tokenizer bytes") -> bytes:
    """As `check_text`. Raises DataError: it is not UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: the text is not UTF-8: {error.reason} at byte {begin + error.start}: convert it, such as by "
            f"iconv -f LATIN1 -t UTF-8{advice}"
        ) from None
    return text
