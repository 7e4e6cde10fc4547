"""Texts to train on: the Python standard library's own source, which is on every machine, or the user's files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmm.data.text.byte_tokenizer import BYTES, ByteTokenizer, Tokenizer
from mmm.data.text.formats import check_is_file, check_text, check_text_file, check_utf8
from mmm.data.text.tokens import TokenArray
from mmm.errors import DataError

__all__ = ["BYTES", "Corpus", "TokenArray", "encoded", "read_text_files", "standard_library"]


@dataclass(frozen=True)
class Corpus:
    """A text, split for training and validation.

    Attributes:
        train, validation: (tokens,) unsigned integers.
        source: where it was read from, for people. files: how many.
        sha256: of all bytes, training first, and of the tokenizer where that is not bytes; of a token file, of its
            manifest or of parts of it.
        unit: what a token is called. tokenizer: None where nobody knows.
        documents: gives (documents,) int64, the tokens before the end of each document, over training and validation;
            None where no document's end is known.
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
    return Corpus(first, second, source, files, digest.hexdigest(), tokenizer=ByteTokenizer(), bytes_per_token=1.0)


def encoded(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """A text of bytes as the tokens of another tokenizer, in memory.

    Raises:
        DataError: the text is no UTF-8, or has a character that the vocabulary lacks.
    """
    if tokenizer.kind == ByteTokenizer.kind:
        return corpus
    try:
        train, validation = (tokenizer.encode(part[:].tobytes()) for part in (corpus.train, corpus.validation))
    except DataError as error:
        raise DataError(f"{corpus.source}: {error}") from None
    digest = hashlib.sha256(f"{corpus.sha256} {tokenizer.sha256}".encode()).hexdigest()
    each = len(corpus.validation) / max(len(validation), 1)
    return Corpus(train, validation, corpus.source, corpus.files, digest, "tokens", tokenizer, bytes_per_token=each)


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


def read_text_files(paths: Sequence[Path], between_characters: bool = False) -> Corpus:
    """Any files as text; the last tenth of each for validation.

    Args:
        between_characters: begin that tenth with a full character, which may have several bytes.

    Raises:
        DataError: a file is missing, is a folder, cannot be read, is empty, is binary or JSON lines, or of another
            format.
    """
    train, validation = [], []
    for path in paths:
        try:
            check_is_file(path, f"--text {path}")
            if check_text_file(path, f"--text {path}"):
                made = f"mmm tokens {path} -o {path.stem}"
                raise DataError(f"--text {path} is JSON lines: prepare it by {made}, and give that folder")
            text = check_text(path.read_bytes(), f"--text {path}")
            if between_characters:
                check_utf8(text, f"--text {path}")
        except OSError as error:
            raise DataError(f"--text {path}: {error.strerror or error}") from None
        end = len(text) - max(len(text) // 10, 1)
        while between_characters and end and text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
            end -= 1
        train.append(text[:end])
        validation.append(text[end:])
    return _corpus(train, validation, ", ".join(str(path) for path in paths), len(paths))
