"""What launch and the agents tell each other over a `link`: what each agent is to run, where launch can be reached, and
failures, whose times do not depend on the clocks of hosts."""

import contextlib
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import Any

from mmm.launch.channel import link as links
from mmm.launch.channel.failures import Failure
from mmm.launch.channel.link import Link, Message
from mmm.launch.contract import Report
from mmm.launch.plan import hosts
from mmm.launch.plan.launch_plan import LaunchPlan

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


def start_commands(plan: LaunchPlan, agents: list[RemoteAgent]) -> list[Message]:
    """What each agent is to run. All agents, in the order of the launcher backend's own numbers."""
    shared = plan.variables
    if plan.wished_port is not None:
        shared["MASTER_PORT"] = str(agents[0].hello["port"])  # it has rank 0
    if plan.by == "host":
        sizes = counts_of(plan, agents)
        return [plan.start_command(sum(sizes[:place]), size, shared) for place, size in enumerate(sizes)]
    by_host: dict[str, list[RemoteAgent]] = {}
    for agent in agents:
        by_host.setdefault(agent.host, []).append(agent)
    made: list[Message] = []
    for agent in agents:
        peers = by_host[agent.host]
        local: Any = agent.hello.get("local_rank")
        if {peer.hello.get("local_rank") for peer in peers} != set(range(len(peers))):
            local = peers.index(agent)  # not said; or the host has several names, and is numbered anew for each
        ranks = [{"RANK": str(agent.index), "LOCAL_RANK": str(local)}]
        same_cores = len({peer.hello["cpus"] for peer in peers}) == 1  # then they divide them
        cores = max(1, agent.hello["cores"] // (len(peers) if same_cores else 1))
        made.append(plan.start_command(agent.index, len(peers), shared, ranks=ranks, cores=cores))
    return made


def counts_of(plan: LaunchPlan, agents: list[RemoteAgent]) -> list[int]:
    """How many ranks each agent has, one agent a host: as planned for a host of its name, which the launcher backend
    may have numbered in another order; where names are others here and there, as planned for its place."""
    hosts_and_counts = zip(plan.hosts.value, plan.counts.value, strict=True)
    planned = {hosts.host_key(name): count for name, count in hosts_and_counts}
    names = [hosts.host_key(agent.host) for agent in agents]
    return [planned[name] for name in names] if sorted(names) == sorted(planned) else list(plan.counts.value)


def slot_commands(plan: LaunchPlan, by_host: dict[int, list[int]], shared: dict[str, str]) -> dict[int, Message]:
    """What each agent of an elastic run is to run. by_host: number of a host → its slots that have a rank."""
    made: dict[int, Message] = {}
    first = 0
    for host, slots in by_host.items():
        made[host] = plan.start_command(first, len(slots), shared)
        name = plan.machine.value.device_variable or DEVICE_VARIABLES.get(plan.device.value or "")
        if slots != list(range(len(slots))) and name:  # a slot is a device, also where another rank takes it
            shown = [device for device in os.environ.get(name, "").split(",") if device]
            order = plan.device_order or shown or list(range(plan.per_host))
            made[host] |= {"device_variable": name, "device_order": [order[slot] for slot in slots]}
        first += len(slots)
    return made


def read_failure(data: dict[str, Any], host: str, now: float) -> Failure:
    """A failure as a host sends it. Its clock is not ours: its time is how long ago."""
    report = Report(**data["report"]) if data["report"] else None
    return Failure(**data | {"time": now - data["time"], "report": report, "host": data["host"] or host})


def write_failure(failure: Failure, now: float) -> dict[str, Any]:
    """The inverse of `read_failure`, on the host."""
    return asdict(failure) | {"time": now - failure.time}


def addresses(plan: LaunchPlan) -> list[str]:
    """Where the hosts can reach this process, the best first."""
    if os.environ.get(links.ADDRESS_VARIABLE):
        return [os.environ[links.ADDRESS_VARIABLE]]
    others = [name for name in plan.hosts.value if not hosts.is_here(name)]
    if not others:
        return ["127.0.0.1"]
    suffix, other = plan.machine.value.host_suffix, others[0]
    own = socket.gethostname()
    found = []
    for name in [hosts.host_key(other) + suffix] * bool(suffix) + [other]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing: it asks which of our addresses leads there
            found.append(probe.getsockname()[0])
    for name in (own.partition(".")[0] + suffix, own):
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(name))
    real = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return real or ["127.0.0.1"]
