"""What a kind of file is to the fuzzer: how valid ones are made, which are changed, what reads them, what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any


@dataclass(frozen=True)
class Kind:
    """
    Attributes:
        make: fills an empty folder with small valid files.
        files: patterns of those that are changed.
        read: has mmm read them, and returns what `wrong` looks at. It may write into the folder.
        wrong: by other means than mmm's, says what of that does not follow from the files; None where all does.
        seal: brings checksums up to date after a change, as who means harm would.
        own: a change of the kind's own, of a file by name and content; None where it has none for that.
        sparse: also a file of `mutate.SPARSE` bytes, of which a reader may not hold more than a part.
        trusted: users name it, or made it themselves: no FIFO, device or bomb takes its place.
        unpickles: classes that its reader may unpickle.
    """

    name: str
    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    wrong: Callable[[Path, Any], str | None] | None = None
    seal: Callable[[Path], None] | None = None
    own: Callable[[str, bytes, Random], tuple[bytes, str] | None] | None = None
    sparse: bool = False
    trusted: bool = False
    unpickles: tuple[str, ...] = ()


def is_small_file(path: Path) -> bool:
    """Whether the fuzzer itself may read it."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size < 1 << 24
