"""What a process that a test starts does with signals, whatever the test runner itself was started to ignore."""

import signal
from collections.abc import Callable

# What a terminal sends to all processes in its foreground.
KEYBOARD = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)
CAUGHT = (*KEYBOARD, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGCHLD)


def as_from_a_terminal(*ignored: int) -> Callable[[], None]:
    """A `preexec_fn`: all signals have their defaults, but `ignored`.

    `make test` may itself run under nohup (SIGHUP ignored) or in the background of a script (SIGINT, SIGQUIT).
    """

    def prepare() -> None:
        for signum in CAUGHT:
            signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return prepare
