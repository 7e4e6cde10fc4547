"""``mmm draw LAYOUT|PROGRAM``: what each rank holds, what it sends, and when, as a picture."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from mmm.errors import ConfigError
from mmm.units import counted
from mmm_lab.cli.draw_layout import HELP, layout_of, looks_like_a_layout, trainer_flags
from mmm_lab.cli.dry_run import dry_run_of
from mmm_lab.cli.parser import Parser, count
from mmm_lab.cli.written import write_text
from mmm_launch.program import target as targets
from mmm_launch.program.target import Target

EPILOG = f"""\
LAYOUT: {HELP}.
PROGRAM: a module or a script that starts a run, with its flags; -n says how many ranks (default: 4).
Other flags go to the program: for a layout to mmm.trainer.lm, on a small model unless they say another.
docs/draw.md says how to read the picture.

examples:
  mmm draw dp2·tp2
  mmm draw zero1 --out zero1.svg
  mmm draw mmm.examples.fsdp_tp --tp 2 -n 4 --out program.svg
exit codes: 0 drawn, 1 the program failed, 2 wrong arguments, or the run would be refused
"""
PROGRAM_RANKS = 4
# Pixels. The site's column of text is as wide as the default.
WIDTH = 680
LEAST_WIDTH = 320


def main(argv: list[str]) -> int:
    """Draw a layout or a program. Returns the exit code. Raises UserError: there is none, or it does not fit."""
    args, program_flags = _parser().parse_known_args(argv)
    if args.width < LEAST_WIDTH:
        raise ConfigError(f"--width {args.width}: it must be at least {LEAST_WIDTH} pixels")
    target, ranks = _program(args.subject, program_flags, args.ranks)
    out = args.out or Path(f"{name_of(args.subject)}.svg")
    if out.suffix.lower() != ".svg":
        raise ConfigError(f"--out {out}: the picture is an SVG, so its name ends with .svg")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    # The picture is of a program that has run, on tensors without elements.
    dry_run = dry_run_of(target, ranks)
    if isinstance(dry_run, int):
        return dry_run

    from mmm_lab.planner.picture.facts import Facts  # imports torch
    from mmm_lab.planner.picture.picture import picture

    # The picture has its command, without the flags that change nothing in it.
    command = ["mmm", "draw", args.subject, *program_flags]
    if args.ranks is not None:
        command += ["-n", str(args.ranks)]
    write_text(out, picture(Facts(dry_run), shlex.join(command), args.width), "--out")
    print(out)
    return 0


def name_of(subject: str) -> str:
    """Returns the file's name: ``dp2-tp2`` for ``dp2·tp2``, ``fsdp_tp`` for ``mmm.examples.fsdp_tp``."""
    if subject.endswith(".py"):
        return Path(subject).stem
    if subject.startswith("mmm."):
        return subject.rpartition(".")[2]
    return re.sub(r"\W+", "-", subject)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mmm draw",
        usage="mmm draw LAYOUT|PROGRAM [-n RANKS] [-o FILE.svg] [FLAGS …]",
        description="Draw what each rank holds, what it sends, and when.",
        epilog=EPILOG,
        # A prefix of a flag may be a flag of the program's.
        allow_abbrev=False,
    )
    parser.add_argument("subject", metavar="LAYOUT|PROGRAM", help="what to draw")
    parser.add_argument("-n", dest="ranks", metavar="RANKS", type=count, help="ranks of a program (default: 4)")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, help="the picture's file (default: LAYOUT.svg or PROGRAM.svg, here)"
    )
    parser.add_argument(
        "--width",
        metavar="PIXELS",
        type=int,
        default=WIDTH,
        help=f"width of the picture; below 560 its cards are stacked, as for a phone (default: {WIDTH})",
    )
    return parser


def _program(subject: str, program_flags: list[str], ranks: int | None) -> tuple[Target, int]:
    """Returns the program to run, and on how many ranks. Raises UserError."""
    kind = "layout"
    if subject.endswith(".py"):
        kind = "script"
    # A layout may be written with dots: pp2.dp2.tp2
    elif re.fullmatch(r"\w+(\.\w+)+", subject) and not looks_like_a_layout(subject):
        kind = "module"
    if kind != "layout":
        target = Target(kind, subject, tuple(program_flags))
        targets.check(target)
        return target, ranks or PROGRAM_RANKS
    # A layout's size is in its name.
    layout, techniques = layout_of(subject)
    if ranks is not None and ranks != layout.ranks:
        raise ConfigError(f"-n {ranks}: the layout {subject} has {counted(layout.ranks, 'rank')}; leave -n out")
    flags = trainer_flags(layout, techniques, program_flags)
    return Target("module", "mmm.trainer.lm", tuple(flags)), layout.ranks
