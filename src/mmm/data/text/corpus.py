"""Texts to train on: the source of Python's standard library, which every machine has, or the user's files."""

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
        train: (tokens,) unsigned integers to train on; for conversations a `mmm.data.text.chat_tokens.ChatText`.
        validation: the same to validate on.
        source: where the text comes from, for people.
        files: number of files.
        sha256: hash of all bytes, training first, and of the tokenizer if it is not that of bytes. For a file of
            tokens: hash in its manifest, or of parts of the file.
        unit: what a token is called.
        tokenizer: the tokenizer; None for bytes, or if it is unknown.
        documents: returns (documents,) int64, the number of tokens before each document's end, over training and
            validation; None if it is not known where documents end.
        bytes_per_token: average number of bytes of a token in the validation text; for a file of tokens, in all of it.
            None if unknown.
        notes: remarks about it for people.
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
        """The facts about the data that a run's record keeps."""
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


def _corpus(train_texts: Sequence[bytes], validation_texts: Sequence[bytes], source: str, files: int) -> Corpus:
    train = b"\n".join(train_texts)
    validation = b"\n".join(validation_texts)
    return Corpus(
        train=np.frombuffer(train, np.uint8),
        validation=np.frombuffer(validation, np.uint8),
        source=source,
        files=files,
        sha256=hashlib.sha256(train + validation).hexdigest(),
        bytes_per_token=1.0,
    )


def standard_library(root: Path | None = None) -> Corpus:
    """Read the top-level modules of this Python's standard library: about 170 files, 4.7 MB.

    A tenth of the files, chosen by a hash of the name, is for validation. So the split of the others does not change
    when a Python version adds a module.

    Args:
        root: folder of the modules; None means this Python's.

    Raises:
        DataError: this Python has no source files on disk.
    """
    if root is None:
        root = Path(sysconfig.get_paths()["stdlib"])
    train: list[bytes] = []
    validation: list[bytes] = []
    for path in sorted(root.glob("*.py")):
        if not path.is_file():
            continue
        digest = hashlib.sha256(path.name.encode()).digest()
        if digest[0] % 10 == 0:
            validation.append(path.read_bytes())
        else:
            train.append(path.read_bytes())
    if not train or not validation:
        raise DataError(
            f"no standard library sources in {root} to train on: give a text with --text FILE, or use --dataset random"
        )
    version = sysconfig.get_python_version()
    n_files = len(train) + len(validation)
    return _corpus(train, validation, f"Python {version} standard library", n_files)


def read_text_files(paths: Sequence[Path], utf8: bool = False) -> Corpus:
    """Read files as text. The last tenth of each is for validation.

    Args:
        paths: the files.
        utf8: whether the text must be UTF-8; then the last tenth begins with a full character. If False, a text may
            hold any bytes but NUL.

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
        edge = len(text) - max(len(text) // 10, 1)
        # Bytes of a UTF-8 character after its first begin with the bits 10.
        while utf8 and edge and text[edge] & 0xC0 == 0x80:
            edge -= 1
        train.append(text[:edge])
        validation.append(text[edge:])
    source = ", ".join(map(str, paths))
    return _corpus(train, validation, source, len(paths))


def check_text(text: bytes, name: object, begin: int = 0, utf8: bool = True) -> bytes:
    """Check that bytes are text, and return them.

    Args:
        text: the bytes.
        name: what messages call the file.
        begin: offset of the first byte in the file.
        utf8: whether the text must be UTF-8.

    Raises:
        DataError: it has a NUL byte, and so is binary; or it is not UTF-8.
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
