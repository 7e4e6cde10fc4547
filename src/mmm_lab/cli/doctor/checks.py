"""All checks, in the order in which they are made and printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from mmm_lab.cli.doctor import collectives, devices, job, python, storage
from mmm_lab.cli.doctor.finding import Finding, Place
from mmm_lab.cli.doctor.isolated import isolated
from mmm_launch.spec import accelerators

STUCK = "a file server does not answer: look at its mount (`mount`, `df`), or ask the centre"


class Check(NamedTuple):
    """A check.

    Attributes:
        name: what it is called where it gives no finding of its own.
        call: ``call(place)`` gives its findings.
        fix: what to do where it gives none in its time, or fails itself.
        imports: it imports torch, and so may take longer.
    """

    name: str
    call: Callable[[Place], Iterable[Finding]]
    fix: str = ""
    imports: bool = False


CHECKS = (
    Check("python", python.check_python),
    Check("packages", python.check_packages, STUCK),
    Check("torch", devices.check_torch, f"importing torch hangs or crashes: {devices.REINSTALL}, or {STUCK}", True),
    Check("scheduler", job.check_job, "names are looked up in DNS, which does not answer"),
    Check("machine", job.check_machine, STUCK),
    Check("outdir", storage.check_outdir, STUCK),
    Check("striping", storage.check_striping, STUCK),
)
# For an Intel GPU, whose driver does not survive a fork: each of these imports torch for itself.
WITH_OWN_IMPORT = (
    Check("devices", devices.check_devices, devices.REINSTALL, True),
    Check("collectives", collectives.check_collectives, devices.REINSTALL, True),
)


def examine(place: Place, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """Make the checks, one after another."""
    for check in checks:
        findings = _make(check, place)
        yield from findings
        # On other devices this check has gone on to them by itself.
        imported = check.call is devices.check_torch and findings[0].status != "fail"
        if imported and accelerators.torch_build() == "xpu":
            for further in WITH_OWN_IMPORT:
                yield from _make(further, place)


def _make(check: Check, place: Place) -> list[Finding]:
    timeout = place.timeout
    if check.imports:
        timeout = place.import_timeout
    return isolated(check.name, lambda: check.call(place), timeout, check.fix)
