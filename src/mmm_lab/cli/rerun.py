"""``mmm rerun RUN [FLAGS]``: starts a run again by its record, with other values of some flags."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from mmm.outside import printable_lines
from mmm_lab.cli.parser import Parser, count

EPILOG = """\
FLAGS are those of the program, such as --lr 0.01. They replace the values of the record; `--decay None` takes one
away. The name, --outdir, --overwrite and --resume of the record are not used: the new run has a folder of its own, and
its config.json names the record (config_file).

examples:
  mmm rerun outputs/vit/2026-01-01-120000 --lr 0.01
  mmm rerun runs/a --seed 1 --outdir runs/a-seed1
  mmm rerun runs/a -n 4 --tp 2 --dry-run
exit codes: that of the run, so 0 where it has finished; 2 wrong arguments, or a record that cannot be used
"""


def main(argv: list[str]) -> int:
    """Print the command line and, without --dry-run, start it in place of this process. Returns 0.

    Raises:
        UserError: as `mmm_lab.campaign.again.again`.
    """
    parser = Parser(
        prog="mmm rerun",
        usage="mmm rerun RUN [-n N] [--dry-run] [FLAGS]",
        description="Start a run again: its program and launch line by its record, with other values of some flags.",
        epilog=EPILOG,
        # `--d` could be the beginning of a flag of the program's.
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, e.g. outputs/<module>/<timestamp>")
    parser.add_argument("-n", dest="ranks", metavar="N", type=count, help="number of ranks (default: as on record)")
    parser.add_argument("--dry-run", action="store_true", help="print the command line, and start nothing")
    args, changes = parser.parse_known_args(argv)

    from mmm_lab.campaign.again import again

    line = again(args.run, changes, args.ranks)
    print(printable_lines(shlex.join(line)), flush=True)
    if not args.dry_run:
        # It gets the terminal's signals itself, and its exit code is that of this command.
        os.execv(sys.executable, [sys.executable, "-m", "mmm_launch", *line[1:]])
    return 0
