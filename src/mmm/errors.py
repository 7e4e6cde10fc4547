"""What can go wrong that a user can fix. Each message says what was given, which rule it breaks, and what to change.

A `UserError` ends the run with exit code 2 and is printed without a traceback: under `launch` once for the whole run;
elsewhere by each rank that has it, unless it is `on_every_rank`.
"""

from __future__ import annotations

from collections.abc import Callable

# Stands around a field, in a message that is not shown yet.
MARK = "\0"


def config_field(name: str) -> str:
    """The field of a configuration, for the message of a `UserError`: a command line shows it as its flag."""
    return f"{MARK}{name}{MARK}"


class UserError(ValueError):
    """Something that the user gave does not fit. Base of all below.

    Attributes:
        on_every_rank: whether every rank is known to raise it, because a collective has told them all: then only rank 0
            prints it. A check that each rank makes for itself does not count: it may fail on one host and pass on the
            others.
        ranks: number of ranks to start instead, if the message says "start 8 ranks". A command line shows the line
            that starts them.
        reported_as: kind of the report to launch, which looks for this attribute.
    """

    reported_as = "user"

    def __init__(
        self, message: object = "", *args: object, on_every_rank: bool = False, ranks: int | None = None
    ) -> None:
        # Text and fields in turn: the pieces at odd places are fields.
        self._pieces = str(message).split(MARK)
        super().__init__("".join(self._pieces), *args)
        self.on_every_rank = on_every_rank
        self.ranks = ranks

    def with_fields(self, name_of: Callable[[str], str]) -> str:
        """The message with other names for its `config_field`s.

        Args:
            name_of: from the name of a field to the one that is shown, such as its flag.
        """
        pieces = list(self._pieces)
        pieces[1::2] = [name_of(field) for field in pieces[1::2]]
        return "".join(pieces)


class ConfigError(UserError):
    """A flag or a configuration value is wrong, or two of them contradict each other."""


class LayoutError(UserError):
    """A mesh layout does not fit the ranks, the model or the batch."""

    reported_as = "layout"


class DeviceError(UserError):
    """The accelerator, backend or data type asked for is not there."""


class DataError(UserError):
    """The data cannot be found or read, or is not what it claims to be."""


class RecordError(UserError):
    """A run's record cannot be written or read."""


class LaunchError(UserError):
    """Ranks cannot be started as asked."""


class DivergedError(UserError):
    """The loss, or a gradient, is no longer finite; ranks do not compute the same model; or a step that was computed
    twice has other bits the second time."""


class HangError(SystemExit):
    """A collective has timed out. The message has been printed before, once for the run. Exit code 1."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.code = 1


class CheckpointError(UserError):
    """A checkpoint cannot be written or read, is damaged, or is of another run."""
