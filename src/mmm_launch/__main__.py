"""The command `launch`, and `python -m mmm_launch`."""

import os
import signal
import sys


def main() -> None:
    """Run launch and exit with its exit code."""
    # Until the next lines Ctrl-C prints Python's traceback, so everything else is imported after them.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Ctrl-C before there are ranks ends this process at once: there is nothing to clean up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # While SIGCHLD is ignored, the kernel throws away the exit codes of child processes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    open_standard_streams()
    from mmm_launch.main import main

    sys.exit(main())


def open_standard_streams() -> None:
    """Open /dev/null as file descriptors 0, 1 and 2, where they are closed."""
    import contextlib

    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # os.open takes the lowest number that is free. Otherwise the next file or socket of launch's own would
            # get it, and everything that is printed would land there.
            with contextlib.suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if __name__ == "__main__":
    main()
