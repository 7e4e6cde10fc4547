"""Prints a `LaunchSpec` as a table: what launch will run, and where each value came from."""

import shlex
import sys
from collections.abc import Sequence

from mmm_launch.contract import DEVICE_VARIABLE
from mmm_launch.spec import hosts
from mmm_launch.spec.host_spec import THREADS, HostSpec
from mmm_launch.spec.launch_spec import LaunchSpec

SHOWN_HOSTS = 8
IN_OTHER_ROWS = ("MASTER_ADDR", "MASTER_PORT", DEVICE_VARIABLE, THREADS)

# Name, value, where the value came from.
Row = tuple[str, str, str]


def table(plan: LaunchSpec, host: HostSpec | None = None, preloads: Sequence[str] = ()) -> str:
    """Format the plan: one line for each value, with its name and source.

    Args:
        plan: what would be started.
        host: for ranks on this host only, what the fork server gets. None: ranks on many hosts.
        preloads: modules that the fork server imports for all ranks.
    """
    rows = _rows(plan)
    command = plan.command
    threads = plan.threads.value or ""
    if host is None:
        rows += _of_cluster(plan)
    else:
        rows += [("started by", host.start, ""), ("preload", ", ".join(preloads), "")]
        command = plan.target.line()
        threads = host.shared[THREADS]
    rows.append((THREADS, threads, plan.threads.source))
    for name, variable in plan.shared.items():
        if name not in IN_OTHER_ROWS and variable.source != "launch":
            # The values of --env may be passwords, and the table goes to logs.
            value = variable.value
            if variable.source == "--env":
                value = "…"
            rows.append((name, value, variable.source))
    rows.append(("command", shlex.join(shown(command)), ""))
    lines = []
    for name, value, source in rows:
        line = f"{name:<14}  {value}"
        if source:
            line += f"   ({source})"
        lines.append(line)
    return "\n".join(lines)


def _rows(plan: LaunchSpec) -> list[Row]:
    """Return the rows that every plan has, on this host or on many."""
    site = plan.machine.value
    names = plan.hosts.value
    some = " ".join(names[:SHOWN_HOSTS])
    if len(names) > SHOWN_HOSTS:
        some += " …"
    device = plan.device.value or "found by each rank"
    if site.backend and device == site.device:
        device += f", {site.backend}"
    job = "none"
    if plan.job.job_id:
        job = f"{plan.job.scheduler} job {plan.job.job_id}"
    address = plan.shared["MASTER_ADDR"]
    port = plan.shared["MASTER_PORT"]
    counts = hosts.in_words(plan.counts.value, SHOWN_HOSTS)
    rows = [
        ("scheduler", job, plan.job.why["scheduler"]),
        ("hosts", f"{len(names)}: {some}", plan.hosts.source),
        ("device", device, plan.device.source),
        ("ranks", f"{plan.ranks}, {counts}", plan.counts.source),
        ("master address", f"{address.value}:{port.value}", f"{address.source}; {port.source}"),
        ("cpu binding", plan.bind.value or "none", plan.bind.source),
    ]
    if plan.elastic is not None:
        rows.append(("elastic", f"{plan.elastic} ranks", "--elastic"))
    if plan.spare:
        rows.append(("spare hosts", " ".join(plan.spare), "of --spare-hosts, or not in use"))
    return rows


def _of_cluster(plan: LaunchSpec) -> list[Row]:
    """Return the rows that only plans for many hosts have."""
    site = plan.machine.value
    machine = "not a known site"
    if site.name:
        machine = f"{site.name}: {site.about}"
    rows = [
        ("machine", machine, plan.machine.source),
        ("started by", f"{plan.launcher.value}, one process a host, which starts its ranks", plan.launcher.source),
    ]
    if plan.device_order:
        order = ", ".join(map(str, plan.device_order))
        shown_by = f"{site.device_variable} of local rank 0, 1, …"
        rows.append(("device order", f"{order} ({shown_by})", site.source_of("device_order")))
    if len(plan.hosts.value) > 1:
        rows += [("advice", line, site.source_of("advice")) for line in site.advice]
    if plan.stage is not None:
        rows.append(("stage", str(plan.stage), "--stage"))
    return rows


def shown(command: list[str]) -> list[str]:
    """Return the command with `python3` in place of this interpreter's full path: it is for people to read."""
    displayed = []
    for word in command:
        if word == sys.executable:
            word = "python3"
        displayed.append(word)
    return displayed
