"""Readers of a JSON file with a fault each, for the fuzzer of files to find."""

import json
import os
import time
from pathlib import Path
from typing import Any

from fuzz_files.kinds import Kind
from mmm.errors import DataError


def make(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps({"name": "a", "sizes": [1, 2, 3]}))


def sound(folder: Path) -> Any:
    path = folder / "a.json"
    if path.is_symlink() or not path.is_file():
        raise DataError(f"{path} is no file")
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise DataError(f"{path} is no JSON") from None


def lets_errors_out(folder: Path) -> Any:
    return json.loads((folder / "a.json").read_text())


def waits(folder: Path) -> Any:
    time.sleep(0 if _is_as_made(folder) else 60)


def fills_memory(folder: Path) -> Any:
    return len(bytes(1 if _is_as_made(folder) else 3 << 30))


def runs(folder: Path) -> Any:
    return _is_as_made(folder) or os.system("true")


def writes_outside(folder: Path) -> Any:
    return _is_as_made(folder) or (folder.parent / "outside" / "new").write_text("x")


def ends(folder: Path) -> Any:
    return _is_as_made(folder) or os.abort()


def says_it_raw(folder: Path) -> Any:
    if not _is_as_made(folder):
        print("no \x1b[2J", flush=True)  # an error's own text is escaped where it is said
        raise DataError("no")


def _is_as_made(folder: Path) -> bool:
    path = folder / "a.json"
    return path.is_file() and path.read_bytes() == json.dumps({"name": "a", "sizes": [1, 2, 3]}).encode()


def kind(reader: str) -> Kind:
    """Of one of the functions above."""
    return Kind("planted", make, ("a.json",), globals()[reader])
