"""What can go wrong that a user can fix: `launch` prints the message, without a traceback, and exits with code 2."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a message: " Did you mean polaris?", or "" where no known name is like `name`."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


class UserError(ValueError):
    """Something the user gave does not fit. Base of the two below.

    Attributes:
        reported_as: kind of the report to launch (`mmm_launch.contract.Report`) where it ends a rank. An exception of
            any package that has this attribute is reported so, without its traceback.
    """

    reported_as = "user"


class LaunchError(UserError):
    """Ranks cannot be started as asked."""


class MachineError(UserError):
    """A machine is not known, or its file is wrong or does not say what is needed."""
