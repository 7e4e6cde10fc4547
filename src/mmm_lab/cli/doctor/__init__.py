"""``mmm doctor``: is this machine, and this installation, fit to run? Each check says what it saw, and how to fix it.

Every check runs in a child process with a time limit: a dead file server, a stuck accelerator or a collective that
hangs becomes a finding. Nothing here imports torch but the child whose check it is.
"""

from __future__ import annotations

from pathlib import Path

from mmm.errors import ConfigError
from mmm_lab.cli import show
from mmm_lab.cli.doctor.checks import examine
from mmm_lab.cli.doctor.finding import Place, as_json, lines, summary
from mmm_lab.cli.parser import Parser

MOST_SECONDS = 86400


def main(argv: list[str]) -> int:
    """Print a line for each check: ok, warn or fail, what was seen, and the fix. Returns 1 if one failed, else 0."""
    parser = Parser(
        prog="mmm doctor",
        description="Check this machine and this installation, with a fix for what is wrong.",
        epilog="Exit code: 0, also with warnings; 1 if a check failed. Run it where ranks will run: on a job's node.",
    )
    parser.add_argument("--json", action="store_true", help="print a list of {name, status, seen, fix}")
    parser.add_argument("--outdir", type=Path, default=Path("outputs"), help="where runs will write (default: outputs)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds a check may take (default 30; four times that to import torch)",
    )
    args = parser.parse_args(argv)
    if not 0 < args.timeout <= MOST_SECONDS:
        raise ConfigError(f"--timeout {args.timeout:g}: it must be greater than 0, and at most {MOST_SECONDS}")

    place = Place(outdir=args.outdir, timeout=args.timeout, import_timeout=4 * args.timeout)
    findings = []
    for finding in examine(place):
        findings.append(finding)
        if not args.json:
            show(f"{lines(finding)}\n")
    if args.json:
        show(f"{as_json(findings)}\n")
    else:
        show(f"\n{summary(findings)}\n")
    return int(any(each.status == "fail" for each in findings))
