"""What a kind of file is to the fuzzer: how valid ones are made, which are changed, what reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kind:
    """
    Attributes:
        make: fills an empty folder with small valid files.
        files: patterns of those that are changed.
        read: has mmm read them. It may write into the folder.
        seal: brings checksums up to date after a change, as who means harm would.
        sparse: also a file of `mutate.SPARSE` bytes, of which a reader may not hold more than a part.
        trusted: users name it, or made it themselves: no FIFO, device or bomb takes its place.
        unpickles: classes that its reader may unpickle.
    """

    name: str
    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    seal: Callable[[Path], None] | None = None
    sparse: bool = False
    trusted: bool = False
    unpickles: tuple[str, ...] = ()


def is_small_file(path: Path) -> bool:
    """Whether the fuzzer itself may read it."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size < 1 << 24
