"""``mmm doctor``: is this machine, and this installation, fit to run? Each check says what it saw, and how to fix it.

Every check runs in a child process with a time limit: a dead file server, a stuck accelerator or a collective that
hangs becomes a finding. Nothing here imports torch but the child whose check it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmm.cli.doctor.checks import examine
from mmm.cli.doctor.finding import Place, as_json, lines, summary
from mmm.errors import ConfigError, UserError

MOST_SECONDS = 86400


def main(argv: list[str]) -> int:
    """Print a line for each check: ok, warn or fail, what was seen, and the fix. Returns 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(
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
    parser.add_argument(
        "--network",
        action="store_true",
        help="of ranks: all-reduces inside the hosts and between them, instead: launch mmm doctor --network",
    )
    parser.add_argument("--site", metavar="NAME", help="with --network, the machine whose figures stand beside")
    args = parser.parse_args(argv)
    if not 0 < args.timeout <= MOST_SECONDS:
        raise ConfigError(f"--timeout {args.timeout:g}: it must be greater than 0, and at most {MOST_SECONDS}")
    if args.network:
        return _network(args)
    if args.site is not None:
        raise ConfigError(f"--site {args.site}: it is of --network alone; without it the machine is the one found here")

    place = Place(outdir=args.outdir, timeout=args.timeout, import_timeout=4 * args.timeout)
    findings = []
    for finding in examine(place):
        findings.append(finding)
        if not args.json:
            _print(lines(finding))
    _print(as_json(findings) if args.json else f"\n{summary(findings)}")
    return int(any(each.status == "fail" for each in findings))


def _network(args: argparse.Namespace) -> int:
    """On each rank: measure, and on rank 0 print. Returns 0, also with warnings; 2 for a user's error among ranks."""
    from mmm.runtime.failure import report_user_error
    from mmm.runtime.ranks import whoami

    rank = whoami()
    if rank.world_size == 1:
        raise ConfigError("--network measures between ranks: launch -n 4 mmm doctor --network, or in a job without -n")
    try:
        from mmm.cli.doctor.collectives import findings
        from mmm.runtime.device import choose_device  # imports torch
        from mmm.runtime.process_group import locate

        rank = locate(rank, args.timeout)
        found = findings(rank, choose_device("auto", rank), args.site, args.timeout)
    except UserError as error:
        report_user_error(error)
        return 2
    if rank.is_main:
        _print(as_json(found) if args.json else "\n".join(lines(finding) for finding in found))
    return 0


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)  # an ASCII terminal gets question marks
