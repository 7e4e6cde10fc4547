"""``mmm doctor``: is this machine fit to run? Each check says what it saw, and how to fix it."""

from __future__ import annotations

from pathlib import Path

from mmm.errors import ConfigError
from mmm_lab.cli.doctor.examine import examine
from mmm_lab.cli.doctor.finding import summary, text_of
from mmm_lab.cli.parser import STANDARD_OUTPUT, Parser
from mmm_lab.cli.written import write_json

MOST_SECONDS = 86400
EPILOG = """\
Run it where ranks will run: on a job's node.

examples:
  mmm doctor
  mmm doctor --outdir /scratch/runs --json doctor.json
exit codes: 0 fit to run, also with warnings; 1 a check failed; 2 wrong arguments
"""


def main(argv: list[str]) -> int:
    """Print a line for each check: ok, warn or fail, what was seen, and the fix. Returns 1 if one failed, else 0."""
    parser = Parser(
        prog="mmm doctor",
        description="Check this machine and this installation, with a fix for what is wrong.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--outdir", metavar="DIR", type=Path, default=Path("outputs"), help="where runs will write (default: outputs)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that a check may take (default: 30; four times that to import torch)",
    )
    parser.add_json("a list of {name, status, seen, fix}")
    args = parser.parse_args(argv)
    if not 0 < args.timeout <= MOST_SECONDS:
        raise ConfigError(f"--timeout {args.timeout:g}: it must be greater than 0, and at most {MOST_SECONDS}")

    with_text = args.json != STANDARD_OUTPUT
    findings = []
    # Each is shown as soon as it is there: a check may take minutes.
    for finding in examine(args.outdir, args.timeout):
        findings.append(finding)
        if with_text:
            print(text_of(finding), flush=True)
    if with_text:
        print(f"\n{summary(findings)}")
    write_json(args.json, [finding._asdict() for finding in findings])
    return int(any(finding.status == "fail" for finding in findings))
