"""Files that a flag asks for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError


def write_text(path: Path, text: str, flag: str) -> None:
    """Write the file that a flag names. Raises ConfigError."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # a name's bytes may be no text
    except OSError as error:
        raise ConfigError(f"{flag} {path}: it cannot be written: {error.strerror}") from None


def write_json(path: Path | None, content: Any) -> None:
    """Write what ``--json`` asks for, if it does. Raises ConfigError."""
    if path is not None:
        write_text(path, json.dumps(_in_json(content), indent=1) + "\n", "--json")


def _in_json(content: Any) -> Any:
    """NaN and infinities, which JSON lacks, as text, as a run's config.json has them."""
    if isinstance(content, float):
        return content if math.isfinite(content) else str(content)
    if isinstance(content, dict):
        return {name: _in_json(value) for name, value in content.items()}
    return [_in_json(value) for value in content] if isinstance(content, (list, tuple)) else content
