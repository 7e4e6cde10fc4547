"""All checks, in the order in which they are made. Each is a process of its own, which prints what it finds.

So a dead file server, a stuck accelerator or a broken torch ends one check, and becomes a finding::

    python3 -m mmm_lab.cli.doctor.examine outdir outputs 30     # the check, --outdir and --timeout
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from mmm_lab.cli.doctor.finding import Finding
from mmm_verify.ranks.forks import die_with_parent

REINSTALL = "reinstall torch for this Python and machine (docs/install.md)"
STUCK = "a file server does not answer: look at its mount (`mount`, `df`), or ask the centre"
# Importing torch reads thousands of files: such a check may take so many times longer.
IMPORTING = 4


class Check(NamedTuple):
    """A check.

    Attributes:
        function: a function of a module of this folder. `function(outdir, timeout)` yields findings.
        fix: what to do if its process hangs or dies.
        imports: whether it imports torch.
    """

    function: str
    fix: str = ""
    imports: bool = False


CHECKS = {
    "python": Check("python.check_python"),
    "packages": Check("python.check_packages", STUCK),
    "advisories": Check("python.check_advisories", STUCK),
    "torch": Check("devices.check_torch", f"importing torch hangs or crashes: {REINSTALL}, or {STUCK}", imports=True),
    "devices": Check("devices.check_devices", "the driver hangs: look at dmesg, and at nvidia-smi or xpu-smi", True),
    "collectives": Check("collectives.check_collectives", REINSTALL, imports=True),
    "scheduler": Check("job.check_job", "names are looked up in DNS, which does not answer"),
    "machine": Check("job.check_machine", STUCK),
    "outdir": Check("storage.check_outdir", STUCK),
}


def examine(outdir: Path, timeout: float, checks: Mapping[str, Check] = CHECKS) -> Iterator[Finding]:
    """Make the checks, one after another.

    Args:
        timeout: seconds that a check may take.
    """
    torch_works = True
    for name, check in checks.items():
        if check.imports and not torch_works:
            yield Finding(name, "fail", "not tried: it needs torch, which does not work here (above)")
            continue
        command = [sys.executable, "-m", __name__, name, str(outdir), str(timeout)]
        findings = list(findings_of(name, command, timeout * (IMPORTING if check.imports else 1), check.fix))
        yield from findings
        if name == "torch" and findings[-1].status == "fail":
            torch_works = False


def findings_of(name: str, command: list[str], timeout: float, fix: str) -> Iterator[Finding]:
    """Run a check, and yield what it prints; and a failure called `name` if it hangs or dies."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as late:
        yield from _printed(late.stdout)
        yield Finding(name, "fail", f"gave no answer in {timeout:g} s, and was ended", fix)
        return
    yield from _printed(done.stdout)
    if done.returncode < 0:
        yield Finding(name, "fail", f"its process was ended by {signal.Signals(-done.returncode).name}", fix)
    elif done.returncode:
        # The last line of a traceback is the error.
        lines = done.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        yield Finding(name, "fail", last or f"its process ended with exit code {done.returncode}", fix)


def _printed(output: bytes | None) -> Iterable[Finding]:
    return [Finding(*json.loads(line)) for line in (output or b"").splitlines()]


def _main(name: str, outdir: str, timeout: str) -> None:
    """Make one check in this process, and print each finding as a line of JSON."""
    die_with_parent(os.getppid())
    # What a library prints must not come between the findings.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, function = CHECKS[name].function.split(".")
    check = getattr(import_module(f"mmm_lab.cli.doctor.{module}"), function)
    for finding in check(Path(outdir), float(timeout)):
        print(json.dumps(finding), file=answers, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
