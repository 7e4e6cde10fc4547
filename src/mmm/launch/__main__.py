"""The command `launch`, and `python -m mmm.launch`."""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Exit with launch's exit code."""
    for fd in (0, 1, 2):                             # one that is closed would become some file of launch's own
        try:
            os.fstat(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C before there are ranks: nothing to end, nothing to say
    from mmm.launch.main import main

    sys.exit(main())


if __name__ == "__main__":
    main()
