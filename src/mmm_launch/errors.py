"""Errors that a user can fix. `launch` prints their message without a traceback, and exits with code 2."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a message: " Did you mean polaris?", or "" where no known name is like `name`."""
    near = difflib.get_close_matches(name, known, n=1)
    if not near:
        return ""
    return f" Did you mean {near[0]}?"


class UserError(ValueError):
    """Something that the user gave does not fit. The base class of the two errors below.

    Attributes:
        reported_as: kind of the report (`mmm_launch.contract.Report`) that launch gets when this error ends a rank.
            An exception of any package that has this attribute is reported in the same way, without its traceback.
    """

    reported_as = "user"


class LaunchError(UserError):
    """Ranks cannot be started as asked."""


class MachineError(UserError):
    """A machine is not known, or its file is wrong or lacks a value that is needed."""
