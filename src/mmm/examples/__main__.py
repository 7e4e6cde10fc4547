"""``python -m mmm.examples``: the list of examples."""

import sys

from mmm.cli.examples import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
