"""The command `launch`, and `python -m mmm.launch`."""

import signal
import sys


def main() -> None:
    """Exit with launch's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C before there are ranks: nothing to end, nothing to say
    from mmm.launch.main import main

    sys.exit(main())


if __name__ == "__main__":
    main()
