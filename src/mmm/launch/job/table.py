"""What launch found and will run, in one table."""

import platform
import shlex
import sys

from mmm.contract import DEVICE_VARIABLE, SITE_VARIABLE
from mmm.launch.job import counts
from mmm.launch.job.cluster import ClusterPlan

SHOWN_HOSTS = 8


def table(plan: ClusterPlan, explain: bool = False) -> str:
    """The plan in rows of name and value; with `explain` also where each value came from, and the ranks' variables."""
    why = plan.why
    site = plan.site
    job = plan.job
    some = " ".join(plan.hosts[:SHOWN_HOSTS]) + (" …" if len(plan.hosts) > SHOWN_HOSTS else "")
    each = counts.in_words(plan.counts, SHOWN_HOSTS)
    started = "each by it" if plan.by == "rank" else "one process a host, which forks its ranks"
    backend = f", {site.backend}" if site.backend and plan.device == site.device else ""
    rows = [
        (
            "machine",
            f"{site.name}: {site.about}" if site.name else f"not a known site ({platform.machine()})",
            why["machine"],
        ),
        ("scheduler", f"{job.scheduler} job {job.job_id}" if job.job_id else "none", why["scheduler"]),
        ("hosts", f"{len(plan.hosts)}: {some}", why["hosts"]),
        ("accelerators", plan.accelerators, why["accelerators"]),
        ("device", f"{plan.device or 'found by each rank'}{backend}", why[DEVICE_VARIABLE]),
        ("ranks", f"{plan.ranks}, {each}", why["ranks"]),
        ("started by", f"{plan.launcher}, {started}", why["launcher"]),
        ("cpu binding", plan.binding, why["cpu binding"]),
        (
            "master address",
            f"{plan.shared['MASTER_ADDR']}:{plan.shared['MASTER_PORT']}",
            f"{why['MASTER_ADDR']}; {why['MASTER_PORT']}",
        ),
    ]
    if explain:
        rows.append(
            (
                "threads",
                str(plan.threads or plan.shared.get("OMP_NUM_THREADS", "counted on each host")),
                why["OMP_NUM_THREADS"],
            )
        )
        told = ("MASTER_ADDR", "MASTER_PORT", DEVICE_VARIABLE, SITE_VARIABLE, "OMP_NUM_THREADS")
        rows += [
            (name, "…" if why.get(name) == "--env" else value, why.get(name, "launch"))
            for name, value in plan.shared.items()
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
    if len(plan.hosts) > 1:
        rows += [("advice", line, site.source_of("advice")) for line in site.advice]
    width = max(len(name) for name, _, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" + (f"   ({reason})" if explain else "") for name, value, reason in rows]
    return "\n".join([*lines, f"{'command':<{width}}{shlex.join(shown(plan.command))}"])


def shown(command: list[str]) -> list[str]:
    """The command without the full path of this interpreter, for people."""
    return ["python3" if word == sys.executable else word for word in command]
