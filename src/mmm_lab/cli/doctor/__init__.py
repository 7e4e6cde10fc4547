"""``mmm doctor``: is this machine, and this installation, fit to run? Each check says what it saw, and how to fix it.

Every check runs in a child process with a time limit: a dead file server, a stuck accelerator or a collective that
hangs becomes a finding. Nothing here imports torch but the child whose check it is.
"""

from __future__ import annotations

from pathlib import Path

from mmm.errors import ConfigError
from mmm_lab.cli.doctor.checks import examine
from mmm_lab.cli.doctor.finding import Place, lines, summary
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

    place = Place(outdir=args.outdir, timeout=args.timeout)
    with_text = args.json != STANDARD_OUTPUT
    findings = []
    # Each is shown as soon as it is there: a check may take minutes.
    for finding in examine(place):
        findings.append(finding)
        if with_text:
            print(lines(finding), flush=True)
    if with_text:
        print(f"\n{summary(findings)}")
    write_json(args.json, findings)
    return int(any(finding.status == "fail" for finding in findings))
