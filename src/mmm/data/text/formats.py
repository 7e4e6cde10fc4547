"""What a file is, by the end of its name and its first bytes: text, JSON lines, tokens, or something else, which is
refused: read as one of these, it would train a model on something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmm.errors import DataError
from mmm.outside import open_file, parse_json

HEAD = 1 << 12  # bytes that are looked at
JSON_LINES = (".jsonl", ".ndjson", ".json")
TOKENS = (".bin", ".idx")
TABLES = (".csv", ".tsv")
BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte-order mark, spaces, and ends of lines
MESSAGES, PROMPT = "messages", "prompt"  # what a line of conversations has one of
AS_IT_IS = "or train on the file as it is, by mmm tokens --field ''"
# How files begin that are neither text nor tokens; 3 bytes at least, or a file of tokens could begin so.
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
    """Raises DataError, which names the file, where the system does not read it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from None


def check_magic(path: Path, head: bytes) -> None:
    """Raises DataError where a file begins as one of another format."""
    for magic, name in OTHERS.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {name}, by its first bytes: make text, JSON lines or a file of tokens of it")


def check_text_file(path: Path, name: str, as_it_is: bool = False) -> bool:
    """Whether it is JSON lines; else it is text.

    Args:
        name: for messages. as_it_is: JSON, CSV and the like are text as well.

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
        raise DataError(f"{name} is a file of tokens, by its name, and no text: programs take it by --text")
    if b"\0" in head:
        raise DataError(
            f"{name} is no text in UTF-8: byte {head.index(0)} is NUL; UTF-16 is converted by iconv -f UTF-16 -t UTF-8"
        )
    if as_it_is:
        return False
    if suffix in TABLES:
        raise DataError(f"{name} is a table, by its name: write its rows as JSON lines, {AS_IT_IS}")
    if suffix in JSON_LINES:
        return True
    if head.lstrip(BLANK).startswith(b"{") and first_record(path) is not None:
        raise DataError(f"{name}: its first line is a JSON object: call it {path.stem}.jsonl, {AS_IT_IS}")
    return False


def first_record(path: Path) -> dict[str, Any] | None:
    """What the first line of JSON lines has; None where it is no object."""
    with reading(path), open_file(path) as file:
        line = next((line for line in file if line.strip(BLANK)), b"")
    try:
        return parse_json(line.strip(BLANK))
    except ValueError:
        return None


def is_chats(path: Path) -> bool:
    """Whether a file that ``--text`` names is conversations; else it is text.

    Raises:
        DataError: it is neither.
    """
    if not check_text_file(path, f"--text {path}"):
        return False
    record = first_record(path)
    if record is None or MESSAGES in record or PROMPT in record:  # a broken line is named where all are read
        return True
    raise DataError(
        f"--text {path} is JSON lines, whose first has neither {MESSAGES} nor {PROMPT}: of texts, prepare it by "
        f"mmm tokens {path} -o {path.stem}, and give that folder"
    )
