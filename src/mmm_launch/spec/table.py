"""What launch found and will run, and where each value came from."""

import platform
import shlex
import sys

from mmm_launch.contract import DEVICE_VARIABLE, SITE_VARIABLE
from mmm_launch.spec import hosts
from mmm_launch.spec.host_spec import HostSpec
from mmm_launch.spec.launch_spec import LaunchSpec

SHOWN_HOSTS = 8
IN_OTHER_ROWS = ("MASTER_ADDR", "MASTER_PORT", DEVICE_VARIABLE, SITE_VARIABLE, "OMP_NUM_THREADS")

Row = tuple[str, str, str]  # name, value, where it came from


def table(plan: LaunchSpec, explain: bool = False, host: HostSpec | None = None, preloads: tuple[str, ...] = ()) -> str:
    """The plan in rows of name and value.

    Args:
        explain: also where each value came from, and the variables of the ranks.
        host: of ranks on this host alone, what its fork server is given. preloads: modules that it imports for all.
    """
    rows = _rows(plan)
    if host is not None:
        rows.append(("started by", host.start, ""))
        if preloads:
            rows.append(("preload", ", ".join(preloads), ""))
        command = plan.target.line()
    else:
        rows += _of_cluster(plan)
        command = plan.command
    if explain:
        rows += _variables(plan, host)
    elif plan.settings:
        rows.append(("settings", " ".join(f"{name}={value}" for name, value in plan.settings.items()), ""))
    rows.append(("command", shlex.join(shown(command)), ""))
    width = max(len(name) for name, _, _ in rows) + 2
    lines = []
    for name, value, source in rows:
        why = f"   ({source})" if explain and source else ""
        lines.append(f"{name:<{width}}{value}{why}")
    return "\n".join(lines)


def _rows(plan: LaunchSpec) -> list[Row]:
    """What ranks on this host alone have, too."""
    site, job = plan.machine.value, plan.job
    names = plan.hosts.value
    some = " ".join(names[:SHOWN_HOSTS]) + (" …" if len(names) > SHOWN_HOSTS else "")
    backend = f", {site.backend}" if site.backend and plan.device.value == site.device else ""
    address, port = plan.shared["MASTER_ADDR"], plan.shared["MASTER_PORT"]
    rows = [
        ("scheduler", f"{job.scheduler} job {job.job_id}" if job.job_id else "none", job.why["scheduler"]),
        ("hosts", f"{len(names)}: {some}", plan.hosts.source),
        ("device", f"{plan.device.value or 'found by each rank'}{backend}", plan.device.source),
        ("ranks", f"{plan.ranks}, {hosts.in_words(plan.counts.value, SHOWN_HOSTS)}", plan.counts.source),
        ("master address", f"{address.value}:{port.value}", f"{address.source}; {port.source}"),
    ]
    if plan.elastic is not None:
        rows.append(("elastic", str(plan.elastic), "--elastic"))
    if plan.stage is not None:
        rows.append(("stage", str(plan.stage), "--stage"))
    return rows


def _of_cluster(plan: LaunchSpec) -> list[Row]:
    site = plan.machine.value
    machine = f"{site.name}: {site.about}" if site.name else f"not a known site ({platform.machine()})"
    rows = [
        ("machine", machine, plan.machine.source),
        ("accelerators", plan.accelerators.value, plan.accelerators.source),
        ("started by", f"{plan.launcher.value}, one process a host, which starts its ranks", plan.launcher.source),
        ("cpu binding", plan.bind.value or "none", plan.bind.source),
    ]
    if plan.device_order:
        order = ", ".join(map(str, plan.device_order))
        shown_by = f"{site.device_variable} of local rank 0, 1, …"
        rows.append(("device order", f"{order} ({shown_by})", site.source_of("device_order")))
    if len(plan.hosts.value) > 1:
        rows += [("advice", line, site.source_of("advice")) for line in site.advice]
    return rows


def _variables(plan: LaunchSpec, host: HostSpec | None) -> list[Row]:
    """Threads, and what else is in the environment of every rank."""
    known = plan.variables if host is None else host.shared
    rows = [("OMP_NUM_THREADS", str(plan.threads.value or known.get("OMP_NUM_THREADS", "")), plan.threads.source)]
    for name, variable in plan.shared.items():
        if name not in IN_OTHER_ROWS:
            rows.append((name, "…" if variable.source == "--env" else variable.value, variable.source))
    return rows


def shown(command: list[str]) -> list[str]:
    """The command without the full path of this interpreter, for people."""
    return ["python3" if word == sys.executable else word for word in command]
