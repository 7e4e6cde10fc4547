"""What can go wrong that a user can fix: `launch` prints the message, without a traceback, and exits with code 2."""


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
