"""Tells what a file is, by the end of its name and its first bytes: text, JSON lines, tokens, or something else.

Anything else is refused: read as one of these, it would train a model on garbage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmm.errors import DataError
from mmm.outside import open_file

# Bytes at the beginning of a file that are examined.
HEAD = 1 << 12
JSON_LINES = (".jsonl", ".ndjson", ".json")
TOKENS = (".bin", ".idx")
TABLES = (".csv", ".tsv")
# How files begin that are neither text nor tokens. At least 3 bytes each: a file of tokens may begin with any two.
OTHERS = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"PK\3\4": "a zip archive, as NumPy's .npz and PyTorch's .pt",
    b"\x93NUMPY": "NumPy",
    b"PAR1": "Parquet",
    b"ARROW1\0\0": "Arrow",
    b"\x89HDF\r\n\x1a\n": "HDF5",
    b"SQLite format 3\0": "SQLite",
    b"MMIDIDX\0": "an index of Megatron's, which is to be called .idx",
    b"GGUF": "GGUF",
    b"%PDF-": "PDF",
}


@contextmanager
def reading(name: object) -> Iterator[None]:
    """Turn an OSError into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from None


def check_magic(path: Path, head: bytes) -> None:
    """Raise DataError if a file begins like one of another format.

    Args:
        head: the file's first bytes.
    """
    for magic, name in OTHERS.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {name}, by its first bytes: convert it to text, JSON lines or a file of tokens")


def check_text_file(path: Path, name: str, as_it_is: bool = False) -> bool:
    """Check that a file is text or JSON lines. Returns True for JSON lines.

    Args:
        name: what messages call the file.
        as_it_is: take JSON, CSV and the like as text too.

    Raises:
        DataError: it is neither, is empty, or cannot be read.
    """
    with reading(name), open_file(path) as file:
        head = file.read(HEAD)
    suffix = path.suffix.lower()
    if not head:
        raise DataError(f"{name}: the file is empty")
    check_magic(path, head)
    if suffix in TOKENS:
        raise DataError(f"{name} is a file of tokens, by its name, not text: programs take it by --text")
    if b"\0" in head:
        raise DataError(
            f"{name} is not text in UTF-8: byte {head.index(0)} is NUL; convert UTF-16 by iconv -f UTF-16 -t UTF-8"
        )
    if as_it_is:
        return False
    if suffix in TABLES:
        raise DataError(
            f"{name} is a table, by its name: write its rows as JSON lines, or train on the file as it is, by mmm "
            f"tokens --field ''"
        )
    return suffix in JSON_LINES
