"""What can go wrong that a user can fix. Each message says what was given, which rule it breaks, and what to change.

A `UserError` ends the run with exit code 2 and is printed without a traceback: under `launch` once for the whole run;
elsewhere by each rank that has it, unless it is `on_every_rank`.
"""

from __future__ import annotations

from collections.abc import Callable

MARK = "\0"  # around a field, in a message under way


def config_field(name: str) -> str:
    """The field of a configuration, for the message of a `UserError`: a command line shows it as its flag."""
    return f"{MARK}{name}{MARK}"


class UserError(ValueError):
    """Something the user gave does not fit. Base of all below.

    Attributes:
        on_every_rank: every rank is known to raise it, because a collective has told them all: rank 0 alone prints it.
            A check that each rank makes for itself does not count: what fails on one host may pass on the others.
        ranks: to start instead, where the message says "start 8 ranks"; a command line shows the line that does.
        reported_as: kind of the report to launch, which looks for this attribute.
    """

    reported_as = "user"

    def __init__(
        self, message: object = "", *args: object, on_every_rank: bool = False, ranks: int | None = None
    ) -> None:
        self._parts = str(message).split(MARK)
        super().__init__("".join(self._parts), *args)
        self.on_every_rank, self.ranks = on_every_rank, ranks

    def with_fields(self, name_of: Callable[[str], str]) -> str:
        """The message, where every `config_field` has the name that it is given, such as of its flag."""
        return "".join(name_of(part) if place % 2 else part for place, part in enumerate(self._parts))


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
    """The loss, or a gradient, is no longer finite, or ranks do not compute the same model."""


class HangError(SystemExit):
    """A collective has timed out. Where it is raised the message has been printed, once for the run: exit code 1."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.code = 1


class CheckpointError(UserError):
    """A checkpoint cannot be written or read, is damaged, or is of another run."""
