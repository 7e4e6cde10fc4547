"""``mmm draw LAYOUT|PROGRAM``: what each rank holds, what it sends, and when, as a picture."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from mmm.errors import ConfigError
from mmm_lab.cli.draw_layout import HELP, layout_of, looks_like_one, trainer_flags
from mmm_lab.cli.dry_run import dry_run_of
from mmm_lab.cli.parser import Parser
from mmm_lab.cli.written import write_text
from mmm_launch.program import target as targets
from mmm_launch.program.target import Target

EPILOG = f"""\
LAYOUT: {HELP}.
PROGRAM: a module or a script that a dry run takes, with its flags; -n says how many ranks (default: 4).
  mmm draw dp2·tp2
  mmm draw zero1 --out zero1.svg
  mmm draw mmm.examples.fsdp_tp --tpsize 2 -n 4 --out program.svg
Other flags go to the program: of a layout mmm.trainer.lm, on a small model unless they say another.
docs/draw.md says how to read it.
"""
RANKS = 4  # of a program


def main(argv: list[str]) -> int:
    """Draw it. Returns the exit code. Raises UserError: no layout, no program, or one that does not fit."""
    args, given = _parser().parse_known_args(argv)
    target, ranks = _program(args.what, given, args.ranks)
    out = args.out or Path(f"{name_of(args.what)}.svg")
    if out.suffix.lower() != ".svg":
        raise ConfigError(f"--out {out}: an SVG is drawn, so its name ends with .svg")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    dry = dry_run_of(target, ranks)
    if isinstance(dry, int):
        return dry

    from mmm_lab.planner.picture.compose import picture  # imports torch
    from mmm_lab.planner.picture.facts import Facts
    from mmm_lab.planner.picture.svg import svg

    words = [word for word in argv if word not in ("--out", f"--out={args.out}", str(args.out))]
    scene = picture(Facts(dry), shlex.join(["mmm", "draw", *words]))
    write_text(out, svg(scene, args.theme), "--out")
    print(out)
    return 0


def name_of(what: str) -> str:
    """A file's name for a layout or a program: ``dp2-tp2`` of ``dp2·tp2``, ``fsdp_tp`` of ``mmm.examples.fsdp_tp``."""
    if what.endswith(".py"):
        return Path(what).stem
    if what.startswith("mmm."):
        return what.rpartition(".")[2]
    return re.sub(r"\W+", "-", what)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mmm draw",
        usage="mmm draw LAYOUT|PROGRAM [-n RANKS] [--out FILE.svg] [FLAGS …]",
        description=__doc__,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("what", metavar="LAYOUT|PROGRAM")
    parser.add_argument("-n", dest="ranks", metavar="RANKS", type=int, help="ranks of a program (default: 4)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file (default: named after the layout, here)")
    parser.add_argument(
        "--theme",
        choices=("auto", "light", "dark"),
        default="auto",
        help="auto: as the reader's browser is set",
    )
    return parser


def _program(what: str, given: list[str], ranks: int | None) -> tuple[Target, int]:
    """What runs, and on how many ranks. Raises UserError."""
    if ranks is not None and not 1 <= ranks <= 2**20:
        raise ConfigError(f"-n {ranks}: it must be from 1 to {2**20:,} ranks")
    if what.endswith(".py") or (re.fullmatch(r"\w+(\.\w+)+", what) and not looks_like_one(what)):
        target = Target("script" if what.endswith(".py") else "module", what, tuple(given))
        targets.check(target)
        return target, ranks or RANKS
    layout, techniques = layout_of(what)
    if ranks is not None and ranks != layout.ranks:
        raise ConfigError(f"-n {ranks}: the layout {what} has {layout.ranks:,} ranks; leave -n out")
    return Target("module", "mmm.trainer.lm", tuple(trainer_flags(layout, techniques, given))), layout.ranks
