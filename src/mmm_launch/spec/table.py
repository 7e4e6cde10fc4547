"""What launch found and will run, and where each value came from."""

import platform
import shlex
import sys

from mmm_launch.contract import DEVICE_VARIABLE, SITE_VARIABLE
from mmm_launch.spec import hosts
from mmm_launch.spec.host_spec import HostSpec
from mmm_launch.spec.launch_spec import LaunchSpec, Value

SHOWN_HOSTS = 8


def describe(plan: LaunchSpec, host: HostSpec, preloads: list[str], explain: bool = False) -> str:
    """The plan for this host alone, rank by rank.

    Args:
        host: what its fork server is given. preloads: the modules that it imports.
    """
    lines = [
        f"ranks    {plan.ranks} on {plan.hosts.value[0]} ({plan.counts.source})",
        f"command  {shlex.join(plan.target.line())}",
        f"start    {host.start}",
    ]
    if explain:
        lines.insert(0, f"machine  this host: {plan.job.why['scheduler']}, {plan.hosts.source}")
    if preloads:
        lines.append(f"preload  {', '.join(preloads)}")
    lines.append("every rank:")
    for name, value in host.shared.items():
        source = plan.shared.get(name, Value("", plan.threads.source)).source
        lines.append(f"  {name}={'…' if source == '--env' else value}" + (f"   ({source})" if source else ""))
    for rank in host.ranks:
        lines.append(f"rank {rank['RANK']}:")
        lines += [f"  {name}={value}" for name, value in rank.items()]
    if plan.elastic is not None:
        lines.append(f"elastic  {plan.elastic}")
    if plan.stage is not None:
        lines.append(f"stage    {plan.stage}")
    return "\n".join(lines)


def table(plan: LaunchSpec, explain: bool = False) -> str:
    """The plan for many hosts in rows of name and value; with `explain` also the sources, and the ranks' variables."""
    site, job, shared = plan.machine.value, plan.job, plan.shared
    names = plan.hosts.value
    some = " ".join(names[:SHOWN_HOSTS]) + (" …" if len(names) > SHOWN_HOSTS else "")
    ranks = f"{plan.ranks}, {hosts.in_words(plan.counts.value, SHOWN_HOSTS)}"
    started = "each by it" if plan.by == "rank" else "one process a host, which forks its ranks"
    backend = f", {site.backend}" if site.backend and plan.device.value == site.device else ""
    machine = f"{site.name}: {site.about}" if site.name else f"not a known site ({platform.machine()})"
    address, port = shared["MASTER_ADDR"], shared["MASTER_PORT"]
    rows = [
        ("machine", machine, plan.machine.source),
        ("scheduler", f"{job.scheduler} job {job.job_id}" if job.job_id else "none", job.why["scheduler"]),
        ("hosts", f"{len(names)}: {some}", plan.hosts.source),
        ("accelerators", plan.accelerators.value, plan.accelerators.source),
        ("device", f"{plan.device.value or 'found by each rank'}{backend}", plan.device.source),
        ("ranks", ranks, plan.counts.source),
        ("started by", f"{plan.launcher.value}, {started}", plan.launcher.source),
        ("cpu binding", plan.binding.value, plan.binding.source),
        ("master address", f"{address.value}:{port.value}", f"{address.source}; {port.source}"),
    ]
    if explain:
        given = shared.get("OMP_NUM_THREADS", Value("counted on each host", ""))
        rows.append(("threads", str(plan.threads.value or given.value), plan.threads.source))
        told = ("MASTER_ADDR", "MASTER_PORT", DEVICE_VARIABLE, SITE_VARIABLE, "OMP_NUM_THREADS")
        rows += [
            (name, "…" if variable.source == "--env" else variable.value, variable.source)
            for name, variable in shared.items()
            if name not in told
        ]
    elif plan.settings:
        rows.append(("settings", " ".join(f"{name}={value}" for name, value in plan.settings.items()), ""))
    if plan.device_order:
        order = ", ".join(map(str, plan.device_order))
        rows.append(
            ("device order", f"{order} ({site.device_variable} of local rank 0, 1, …)", site.source_of("device_order"))
        )
    if plan.elastic is not None:
        rows.append(("elastic", str(plan.elastic), "--elastic"))
    if plan.stage is not None:
        rows.append(("stage", str(plan.stage), "--stage"))
    if len(names) > 1:
        rows += [("advice", line, site.source_of("advice")) for line in site.advice]
    width = max(len(name) for name, _, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" + (f"   ({reason})" if explain else "") for name, value, reason in rows]
    return "\n".join([*lines, f"{'command':<{width}}{shlex.join(shown(plan.command))}"])


def shown(command: list[str]) -> list[str]:
    """The command without the full path of this interpreter, for people."""
    return ["python3" if word == sys.executable else word for word in command]
