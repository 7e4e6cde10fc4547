"""``mmm machine``: the known machines; one of them, each value with its source; a file of the machine that this is."""

from __future__ import annotations

import os
from pathlib import Path

from mmm.errors import ConfigError
from mmm_lab.cli.parser import Parser
from mmm_lab.planner import machine_text
from mmm_lab.planner.measured import measured_path
from mmm_launch.machines import find
from mmm_launch.machines.machine import Machine

EPILOG = f"""\
A machine is one JSON file, for launch, mmm plan and mmm doctor. Yours go to ~/.config/mmm/machines, or to a file or
folder that {find.VARIABLE} names; one of the same name replaces ours. docs/clusters.md says what is in it.

examples:
  mmm machine
  mmm machine aurora
  mmm machine --measure --out here.json
exit codes: 0 done, 2 wrong arguments, or a machine that is not known
"""


def main(argv: list[str]) -> int:
    """List the machines, show one, or measure this one. Returns 0. Raises UserError."""
    parser = Parser(
        prog="mmm machine",
        description="List the known machines, show one of them, or measure this one.",
        epilog=EPILOG,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show this one; without it, list all")
    parser.add_argument("--measure", action="store_true", help="measure this machine, and write its file")
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        type=Path,
        help="the file of --measure (default: the one by which runs here are predicted)",
    )
    args = parser.parse_args(argv)
    if args.measure:
        if args.name is not None:
            raise ConfigError(f"{args.name} --measure: this machine is measured, so leave the name out")
        from mmm_lab.planner.measure import measure_machine  # imports torch

        # There a run looks for the rates of its host.
        out = args.out or measured_path()
        print("\n".join(machine_text.assumed(measure_machine(out))))
        print(f"written: {out}; mmm plan --machine {out} reads it")
        return 0
    if args.out is not None:
        raise ConfigError(f"--out {args.out}: only --measure writes a file; add it, or leave --out out")
    if args.name is None:
        print("\n".join(_line(machine) for machine in find.load(os.environ).values()))
    else:
        print("\n".join(_details(find.named(os.environ, args.name))))
    return 0


def _line(machine: Machine) -> str:
    # `mmm plan` cannot count without all of its rates; launch can start.
    missing = machine.missing()
    line = f"{machine.name.lower():<14} {machine.about}"
    if missing:
        line += f"; no {', '.join(missing)}, so not for mmm plan"
    return line


def _details(machine: Machine) -> list[str]:
    return [
        f"{machine.name}: {machine.about}",
        machine.file,
        "",
        "what launch goes by",
        *machine_text.settings(machine),
        "",
        "what mmm plan counts with",
        *machine_text.assumed(machine),
    ]
