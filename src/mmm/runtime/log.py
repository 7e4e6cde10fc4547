"""The log: one line for each message, written at once, by rank 0 unless all ranks are asked for.

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
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"

# Texts that `say_once` has logged since `logging_to` began.
_logged_once: set[str] = set()


def get_logger() -> logging.Logger:
    """Return the package's logger. It writes nothing until `logging_to` gives it somewhere to write."""
    return logging.getLogger(LOGGER)


def say_once(text: str, stacklevel: int = 1) -> bool:
    """Log a text unless `say_once` has logged it before. Returns whether it logged it now."""
    if text in _logged_once:
        return False
    _logged_once.add(text)
    get_logger().info(text, stacklevel=stacklevel + 1)
    return True


class _Formatter(logging.Formatter):
    def __init__(self, tag: str = "", colour: bool = False) -> None:
        super().__init__()
        self.tag = tag
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        # With two handlers, both lines have the time that the first has made.
        if not hasattr(record, "asctime"):
            when = datetime.fromtimestamp(record.created)
            record.asctime = when.strftime("%Y-%m-%d %H:%M:%S.%f")
        head = f"[{record.asctime}][{record.levelname}][{record.module}:{record.lineno}]{self.tag} - "
        if self.colour:
            colour = _COLOURS.get(record.levelname, _DIM)
            head = f"{colour}{head}{_PLAIN}"
        text = head + record.getMessage()
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return text


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


# Python 3.10 knows no StreamHandler[TextIO].
class _Printed(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to what `sys.stdout` is when a line comes: while a run has a bar, that puts the line above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


class _Copy(logging.FileHandler):
    """A copy of the log in a file. When the disk is full it ends and says so once; the run continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        get_logger().removeHandler(self)
        print(f"{self.baseFilename} ends here: {error.strerror}", file=sys.stderr, flush=True)

    def close(self) -> None:
        # Closing writes what is still in the buffer, which fails again on a full disk.
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(
    rank: int,
    file: Path | None = None,
    all_ranks: bool = False,
    verbose: bool = False,
) -> Iterator[logging.Logger]:
    """Send the package's log to standard output, and to `file` as well, for the length of a ``with`` block.

    Details (``log.debug``) are always in the file. Standard output has them only if `verbose`.

    Args:
        rank: rank of this process. Ranks other than 0 only log errors, unless `all_ranks`.
        file: where rank 0 writes a copy, which is appended to.
        all_ranks: every rank logs, with its rank in each line.
        verbose: details are printed as well.
    """
    logger = get_logger()
    _logged_once.clear()
    tag = f"[rank {rank}]" if all_ranks else ""
    handlers: list[logging.Handler] = []
    # It flushes after each record.
    out = _Printed()
    out.setFormatter(_Formatter(tag, _wants_colour(sys.stdout)))
    out.setLevel(logging.DEBUG if verbose else logging.INFO)
    handlers.append(out)
    if file is not None and rank == 0:
        copy = _Copy(file, encoding="utf-8", errors="backslashreplace")
        copy.setFormatter(_Formatter(tag))
        copy.setLevel(logging.DEBUG)
        handlers.append(copy)
    level_before = logger.level
    propagate_before = logger.propagate
    # A message that no handler takes is not wanted at all, so nobody has to make its text.
    level = logging.ERROR
    if rank == 0 or all_ranks:
        level = min(handler.level for handler in handlers)
    logger.setLevel(level)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield logger
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.level = level_before
        logger.propagate = propagate_before


@contextmanager
def ignore_views() -> Iterator[None]:
    """Keep PyTorch from warning of FSDP units whose output is a view, for the length of a ``with`` block.

    Under tensor parallelism they have such outputs. Writing into a view would be wrong, but no model here does so.
    Enter it once in a run: each change of the filters makes Python repeat warnings that it has already shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        yield
