"""Errors that a user can fix. A message says what was given, which rule it breaks, and what to change."""

from __future__ import annotations

import traceback

# The most characters of another library's error in a line. Some print a whole tensor.
LONGEST = 600


class UserError(ValueError):
    """Something that the user gave does not fit. Base class of the errors below.

    Attributes:
        reported_as: the kind of error in a report to a launcher. An exception of any package that has this attribute is
            shown without a traceback: its message says everything.
    """

    reported_as = "user"


class ConfigError(UserError):
    """An argument is wrong, or two of them contradict each other."""


class LayoutError(UserError):
    """A mesh does not fit this host or the batch."""


class RecordError(UserError):
    """A file cannot be written."""


def describe(error: BaseException) -> str:
    """Describe an error of a user's code in one line. The end of a very long one is left out: a traceback has it."""
    message = " ".join(str(error).split())
    if len(message) > LONGEST:
        message = f"{message[:LONGEST]} … ({len(message):,} characters)"
    return f"{type(error).__name__}: {message}"


def own_frame(error: BaseException, others: tuple[str, ...]) -> traceback.FrameSummary | None:
    """The innermost frame of an error that is the user's. None if it came up elsewhere.

    Args:
        others: how the paths of files begin that are not the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return own[-1] if own else None


def is_for_user(error: BaseException) -> bool:
    """Whether an error is shown without a traceback: a `UserError`, or an error of another package that says so."""
    return hasattr(error, "reported_as")
