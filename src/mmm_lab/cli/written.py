"""Writes the files that a flag asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmm.errors import ConfigError
from mmm.history.record.folder import encode
from mmm_lab.cli.parser import STANDARD_OUTPUT


def write_text(path: Path, text: str, flag: str) -> None:
    """Write the file that a flag names. Raises ConfigError: it cannot be written."""
    try:
        # A file's name, which the text may hold, need not be UTF-8.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: it cannot be written: {error.strerror}") from None


def write_json(path: Path | None, content: Any) -> None:
    """Write what ``--json`` asks for, to a file or to standard output. Does nothing where `path` is None.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    # NaN and infinities, which JSON lacks, become text.
    text = encode(content)
    if path == STANDARD_OUTPUT:
        print(text)
    else:
        write_text(path, f"{text}\n", "--json")
