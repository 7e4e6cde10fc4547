"""``mmm exercise``: ten small things to write, and a check that says where an answer is wrong."""

from __future__ import annotations

from pathlib import Path

from mmm.errors import ConfigError
from mmm_lab.cli.parser import Parser

EPILOG = """\
mmm exercise                     lists them
mmm exercise start NAME [FILE]   writes the file to begin with
mmm exercise check FILE          says whether the answer is right, and else where it is wrong; exit code 1
"""


def main(argv: list[str]) -> int:
    """List, start, or check. Returns 0; 1 for a wrong answer. Raises UserError."""
    parser = Parser(prog="mmm exercise", description=__doc__, epilog=EPILOG)
    actions = parser.add_subparsers(dest="action", metavar="start | check")
    start = actions.add_parser("start", help="write the file to begin with")
    start.add_argument("name", metavar="NAME")
    start.add_argument("file", metavar="FILE", type=Path, nargs="?", help="default: NAME.py, here")
    check = actions.add_parser("check", help="check an answer")
    check.add_argument("file", metavar="FILE", type=Path)
    args = parser.parse_args(argv)

    from mmm_lab.exercises import NAMES
    from mmm_lab.exercises.check import check_file, exercise, file_of  # imports torch

    if args.action is None:
        for number, name in enumerate(NAMES, 1):
            print(f"{number:>2}  {name:<18} {(exercise(name).__doc__ or '').strip().splitlines()[0]}")
        print("\nmmm exercise start NAME writes the file to begin with")
        return 0
    if args.action == "start":
        path = args.file or Path(f"{args.name}.py")
        text = file_of(args.name)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        print(f"written: {path}; edit it, then: mmm exercise check {path}")
        return 0
    result = check_file(args.file)
    print(result.text)
    print("right" if result.right else "not yet")
    return 0 if result.right else 1
