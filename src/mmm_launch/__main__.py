"""The command `launch`, and `python -m mmm_launch`."""

import os
import signal
import sys


def main() -> None:
    """Exit with launch's exit code. What can wait is imported later: until here Ctrl-C prints Python's traceback."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Ctrl-C before there are ranks ends this process at once: there is nothing to clean up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # While SIGCHLD is ignored, the kernel throws away the exit codes of child processes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    open_standard_streams()
    from mmm_launch.main import main

    sys.exit(main())


def open_standard_streams() -> None:
    """Open those of file descriptors 0, 1, 2 that are closed: they would become some files of launch's own."""
    import contextlib

    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if __name__ == "__main__":
    main()
