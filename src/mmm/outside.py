"""Reads what others wrote: files and their locks, JSON, names in it, and text for a terminal. Imports no torch.

A file that another made may be a FIFO that nobody writes to, a device that never ends, or a million brackets: it is
refused in a line.
"""

from __future__ import annotations

import enum
import os
import re
import shutil
import struct
from pathlib import Path

from mmm.errors import ConfigError
from mmm_launch.contract import LARGEST as LARGEST
from mmm_launch.contract import LONGEST_SHOWN as LONGEST_SHOWN
from mmm_launch.contract import open_file as open_file
from mmm_launch.contract import parse_json as parse_json
from mmm_launch.contract import printable as printable
from mmm_launch.contract import printable_lines as printable_lines
from mmm_launch.contract import read_file as read_file
from mmm_launch.contract import read_json as read_json
from mmm_launch.contract import short as short

# A heap of texts in an HDF5 file begins with this.
HEAP = b"GCOL\x01"
# Bytes of a file's name, on most file systems.
LONGEST_NAME = 255


def free_there(folder: Path) -> str:
    """How much is free on the disk of a folder, for the message of a failed write."""
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError:
        return "the free space there is unknown"


def check_heaps(content: bytes) -> None:
    """Raises ValueError for an HDF5 file that the HDF5 library would read without an end.

    A heap holds texts one after another, each with its size. The library goes from one to the next by that size, so an
    entry of free space whose size is 0 leads it to the same place forever.

    Source: HDF5 file format, section III.E.
    """
    begin = content.find(HEAP)
    while begin >= 0:
        size_of_heap = int.from_bytes(content[begin + 8 : begin + 16], "little")
        end = min(begin + size_of_heap, len(content))
        entry = begin + 16
        while entry + 16 <= end:
            head = content[entry : entry + 16]
            # The index of free space is 0.
            index, size = struct.unpack("<H6xQ", head)
            if index == 0 and size == 0:
                raise ValueError(f"the heap at byte {begin} has an entry without a size")
            # The size of free space includes its head, that of a text does not.
            if index > 0:
                entry += 16
            # Entries begin at multiples of 8 bytes.
            entry += (size + 7) // 8 * 8
        begin = content.find(HEAP, begin + 1)


class Lock(enum.Enum):
    """The result of asking for a file's lock."""

    LOCKED = "held by us"
    TAKEN = "held by another"
    NONE = "the file system has no locks"


def lock(descriptor: int, shared: bool = False) -> Lock:
    """Take a file's advisory lock, if it is free. Closing the descriptor releases it.

    Args:
        descriptor: the open file.
        shared: take a lock that others may share; it is not free while somebody has an exclusive one.
    """
    try:
        # Windows has no such module.
        import fcntl

        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except (ImportError, OSError):
        # ENOLCK, ENOSYS, EOPNOTSUPP, …: some file systems have no locks.
        return Lock.NONE
    return Lock.LOCKED


def is_plain_name(name: object) -> bool:
    """Whether a name that stands in a file may name another file next to it: it leads to no other folder, and is
    printable."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and len(name.encode()) <= LONGEST_NAME
    )


def expanded(path: str) -> Path:
    """A path that somebody has given, with the home in place of ~, and the values of variables in place of their names.

    Raises:
        ConfigError: a variable is not set, or empty; there is no such user.
    """

    def value(name: re.Match[str]) -> str:
        text = os.environ.get(name[1] or name[2])
        if not text:
            raise ConfigError(f"{path}: the variable {name[0]} is not set; set it, or write out what it stands for")
        return text

    full = os.path.expanduser(re.sub(r"\$([A-Za-z_]\w*)|\$\{(\w+)\}", value, path))
    if full.startswith("~"):
        raise ConfigError(f"{path}: there is no such user; a folder of that name is ./{path}")
    return Path(full)
