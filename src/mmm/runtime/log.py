"""The log: one line a message, rank 0 only unless asked, flushed, coloured on a terminal only.

``[2025-01-03 09:58:07.893360][INFO][fsdp_tp:227] - iter=2 loss=10.783049 dt=0.400887``
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

LOGGER = "mmm"
_COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def get_logger() -> logging.Logger:
    """The package's logger. It says nothing until `logging_to` gives it somewhere to write."""
    return logging.getLogger(LOGGER)


_said: set[str] = set()  # by `say_once`, since `logging_to` began


def say_once(text: str, stacklevel: int = 1) -> bool:
    """Log a text, unless it has been logged so before. Whether it was."""
    if text in _said:
        return False
    _said.add(text)
    get_logger().info(text, stacklevel=stacklevel + 1)
    return True


class _Formatter(logging.Formatter):
    def __init__(self, tag: str = "", colour: bool = False) -> None:
        super().__init__()
        self.tag, self.colour = tag, colour

    def format(self, record: logging.LogRecord) -> str:
        if not hasattr(record, "asctime"):  # of two handlers the first makes it
            record.asctime = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")
        head = f"[{record.asctime}][{record.levelname}][{record.module}:{record.lineno}]{self.tag} - "
        if self.colour:
            head = f"{_COLOURS.get(record.levelname, _DIM)}{head}{_PLAIN}"
        text = head + record.getMessage()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class _Copy(logging.FileHandler):
    """The log in a file, which a full disk ends, said once: the run goes on, and its record says why it ends."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        get_logger().removeHandler(self)
        print(f"{self.baseFilename} ends here: {error.strerror}", file=sys.stderr, flush=True)

    def close(self) -> None:
        with suppress(OSError):  # what is still in its buffer
            super().close()


@contextmanager
def logging_to(
    rank: int, file: Path | None = None, all_ranks: bool = False, verbose: bool = False
) -> Iterator[logging.Logger]:
    """Send the package's log to standard output, and to `file` as well, for the length of a ``with`` block.

    Details (``log.debug``) are always in the file. Standard output has them only if `verbose`.

    Args:
        rank: of this process; ranks other than 0 are silent up to warnings, and below errors, unless `all_ranks`.
        file: rank 0's copy, appended to.
        all_ranks: every rank writes, with its number in the line.
        verbose: details are printed too.
    """
    logger = get_logger()
    _said.clear()
    tag = f"[rank {rank}]" if all_ranks else ""
    handlers: list[logging.Handler] = []
    out = logging.StreamHandler(sys.stdout)  # flushes after each record
    out.setFormatter(_Formatter(tag, _wants_colour(sys.stdout)))
    out.setLevel(logging.DEBUG if verbose else logging.INFO)
    handlers.append(out)
    if file is not None and rank == 0:
        copy = _Copy(file, encoding="utf-8", errors="backslashreplace")
        copy.setFormatter(_Formatter(tag))
        handlers.append(copy)
    before = logger.level, logger.propagate
    # Whether a message is wanted at all; each handler then has a level of its own.
    logger.setLevel(logging.DEBUG if rank == 0 or all_ranks else logging.ERROR)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield logger
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.level, logger.propagate = before


@contextmanager
def ignore_views() -> Iterator[None]:
    """Inside, PyTorch does not warn of FSDP units whose output is a view, as under tensor parallelism: it would be
    wrong to write into one, which no model here does. To be entered once a run: each change of the filters makes Python
    repeat warnings that it has shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        yield
