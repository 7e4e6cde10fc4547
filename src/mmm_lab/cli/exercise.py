"""``mmm exercise``: ten small things to write, and a check that says where an answer is wrong."""

from __future__ import annotations

from pathlib import Path

from mmm.errors import ConfigError
from mmm_lab.cli.parser import Parser

EPILOG = """\
examples:
  mmm exercise                              lists them
  mmm exercise start all_reduce             writes all_reduce.py: the question, and a function to write
  mmm exercise check all_reduce.py          says whether the answer is right, and if not, where it is wrong
exit codes: 0 done, or the answer is right; 1 it is not; 2 wrong arguments, or a file that cannot be read
"""


def main(argv: list[str]) -> int:
    """List, start, or check. Returns the exit code. Raises UserError."""
    parser = Parser(
        prog="mmm exercise",
        description="Ten small things to write, each with a check that says where an answer is wrong.",
        epilog=EPILOG,
    )
    actions = parser.add_subparsers(dest="action", metavar="start | check")
    start = actions.add_parser("start", help="write the file to begin with")
    start.add_argument("name", metavar="NAME", help="name of the exercise")
    start.add_argument("-o", "--out", metavar="FILE", type=Path, help="the file to write (default: NAME.py, here)")
    check = actions.add_parser("check", help="check an answer")
    check.add_argument("file", metavar="FILE", type=Path, help="the file, filled in")
    args = parser.parse_args(argv)

    from mmm_lab.exercises import NAMES
    from mmm_lab.exercises.check import check_file, exercise, file_of  # imports torch

    if args.action is None:
        for place, name in enumerate(NAMES, 1):
            # The first line of the module's docstring is its title.
            title, _, _ = (exercise(name).__doc__ or "").partition("\n")
            print(f"{place:>2}  {name:<18} {title}")
        print("\nmmm exercise start NAME writes the file to begin with")
        return 0
    if args.action == "start":
        path = args.out or Path(f"{args.name}.py")
        text = file_of(args.name)
        try:
            # "x": an answer that is there is not written over.
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        print(f"written: {path}; edit it, then: mmm exercise check {path}")
        return 0
    result = check_file(args.file)
    print(result.text)
    if result.right:
        print("right")
        return 0
    print("not yet")
    return 1
