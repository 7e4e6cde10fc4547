"""What can go wrong that a user can mend. Each message says what was given, which rule it breaks, and what to change.

A `UserError` is printed once for the whole run, without a traceback, and ends it with exit code 2.
"""


class UserError(ValueError):
    """Something the user gave does not fit. Base of all below."""


class ConfigError(UserError):
    """A flag or a configuration value is wrong, or two of them contradict each other."""


class LayoutError(UserError):
    """A mesh layout does not fit the ranks, the model or the batch."""


class DeviceError(UserError):
    """The accelerator, backend or data type asked for is not there."""


class DataError(UserError):
    """The data cannot be found or read, or is not what it claims to be."""


class RecordError(UserError):
    """A run's record cannot be written or read."""


class LaunchError(UserError):
    """Ranks cannot be started as asked."""


class DivergedError(UserError):
    """The loss is no longer a finite number."""
