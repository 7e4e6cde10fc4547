"""What launch and the agents tell each other over a `link`: what each agent is to run, where launch can be reached, and
failures, whose times do not depend on the clocks of hosts."""

import contextlib
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import Any

from mmm.contract import Report
from mmm.launch.channel import link as links
from mmm.launch.channel.failures import Failure
from mmm.launch.channel.link import Link, Message
from mmm.launch.job import hosts
from mmm.launch.job.cluster import ClusterPlan

DEVICE_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@dataclass
class RemoteAgent:
    """One of the processes that mpiexec or srun has started."""

    link: Link
    index: int = -1  # 0 … processes − 1, once it has said hello
    host: str = ""
    hello: Message = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    done: bool = False  # its ranks are gone, it has said so


def common_command(plan: ClusterPlan) -> Message:
    """What every agent is told alike."""
    common: Message = {name: getattr(plan, name) for name in ("by", "device", "bind", "prefork", "threads")}
    if plan.device_order:
        common["device_variable"], common["device_order"] = plan.site.device_variable, plan.device_order
    return common


def start_commands(plan: ClusterPlan, agents: list[RemoteAgent]) -> list[Message]:
    """What each agent is to run. All agents, in the order of the launcher backend's own numbers."""
    common, shared = common_command(plan), plan.shared
    if plan.wished_port is not None:
        shared = shared | {"MASTER_PORT": str(agents[0].hello["port"])}  # it has rank 0
    made: list[Message] = []
    there: dict[str, list[RemoteAgent]] = {}
    for agent in agents:
        there.setdefault(agent.host, []).append(agent)
    sizes = counts_of(plan, agents) if plan.by == "host" else []
    for agent in agents:
        if plan.by == "host":
            first = sum(sizes[: agent.index])
            local_ranks = range(first, first + sizes[agent.index])
            ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank - first)} for rank in local_ranks]
            message = {"ranks": ranks, "shared": shared | {"LOCAL_WORLD_SIZE": str(len(ranks))}}
        else:
            mates = there[agent.host]
            local: Any = agent.hello.get("local_rank")
            if {mate.hello.get("local_rank") for mate in mates} != set(range(len(mates))):
                local = mates.index(agent)  # not said; or the host has several names, and is numbered anew for each
            rank = {"RANK": str(agent.index), "LOCAL_RANK": str(local)}
            same_cores = len({mate.hello["cpus"] for mate in mates}) == 1  # then they divide them
            cores = max(1, agent.hello["cores"] // (len(mates) if same_cores else 1))
            message = {"ranks": [rank], "shared": shared | {"LOCAL_WORLD_SIZE": str(len(mates))}, "cores": cores}
        made.append(common | message)
    return made


def counts_of(plan: ClusterPlan, agents: list[RemoteAgent]) -> list[int]:
    """How many ranks each agent has, one agent a host: as planned for a host of its name, which the launcher backend
    may have numbered in another order; where names are others here and there, as planned for its place."""
    planned = {name.partition(".")[0]: count for name, count in zip(plan.hosts, plan.counts, strict=True)}
    names = [agent.host.partition(".")[0] for agent in agents]
    return [planned[name] for name in names] if sorted(names) == sorted(planned) else list(plan.counts)


def slot_commands(plan: ClusterPlan, by_host: dict[int, list[int]], shared: dict[str, str]) -> dict[int, Message]:
    """What each agent of an elastic run is to run. by_host: number of a host → its slots that have a rank."""
    made: dict[int, Message] = {}
    first = 0
    for host, slots in by_host.items():
        ranks = [{"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(len(slots))]
        message = common_command(plan) | {"ranks": ranks, "shared": shared | {"LOCAL_WORLD_SIZE": str(len(slots))}}
        name = plan.site.device_variable or DEVICE_VARIABLES.get(plan.device or "")
        if slots != list(range(len(slots))) and name:  # a slot is a device, also where another rank takes it
            shown = [device for device in os.environ.get(name, "").split(",") if device]
            order = plan.device_order or shown or list(range(plan.per_host))
            message |= {"device_variable": name, "device_order": [order[slot] for slot in slots]}
        made[host] = message
        first += len(slots)
    return made


def read_failure(data: dict[str, Any], host: str, now: float) -> Failure:
    """A failure as a host sends it. Its clock is not ours: it says how long ago."""
    report = Report(**data["report"]) if data["report"] else None
    return Failure(
        data["rank"],
        data["exit_code"],
        now - data["ago"],
        data["doubt"],
        report,
        data["text"],
        data["host"] or host,
        data["final"],
    )


def write_failure(failure: Failure, now: float) -> dict[str, Any]:
    """The inverse of `read_failure`, on the host."""
    return asdict(failure) | {"ago": now - failure.time}


def addresses(plan: ClusterPlan) -> list[str]:
    """Where the hosts can reach this process, the best first."""
    if os.environ.get(links.ADDRESS_VARIABLE):
        return [os.environ[links.ADDRESS_VARIABLE]]
    if all(hosts.is_here(name) for name in plan.hosts):
        return ["127.0.0.1"]
    suffix = plan.site.host_suffix
    other = next(name for name in plan.hosts if not hosts.is_here(name))
    own = socket.gethostname()
    found = []
    for name in [other.partition(".")[0] + suffix] * bool(suffix) + [other]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing: it asks which of our addresses leads there
            found.append(probe.getsockname()[0])
    for name in (own.partition(".")[0] + suffix, own):
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(name))
    real = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return real or ["127.0.0.1"]
