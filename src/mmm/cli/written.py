"""Files that a flag asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError


def write_text(path: Path, text: str, flag: str) -> None:
    """Write the file that a flag names. Raises ConfigError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: it cannot be written: {error.strerror}") from None


def write_json(path: Path | None, content: Any) -> None:
    """Write what ``--json`` asks for, if it does. Raises ConfigError."""
    if path is not None:
        write_text(path, json.dumps(content, indent=1) + "\n", "--json")
