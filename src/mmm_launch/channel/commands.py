"""What launch and the agents tell each other over a `link`: what each agent is to run, where launch can be reached, and
failures, whose times do not depend on the clocks of hosts."""

import contextlib
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import Any

from mmm_launch.channel import link as links
from mmm_launch.channel.failures import Failure
from mmm_launch.channel.link import Link, Message
from mmm_launch.contract import Report
from mmm_launch.spec import hosts
from mmm_launch.spec.launch_spec import LaunchSpec


@dataclass
class RemoteAgent:
    """One of the processes that mpiexec or srun has started."""

    link: Link
    index: int = -1  # 0 … processes − 1, once it has said hello
    host: str = ""
    hello: Message = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    done: bool = False  # its ranks are gone, it has said so


def start_commands(plan: LaunchSpec, agents: list[RemoteAgent]) -> list[Message]:
    """What each agent is to run. All agents, in the order of the launcher backend's own numbers."""
    shared = plan.variables
    if plan.wished_port is not None:
        shared["MASTER_PORT"] = str(agents[0].hello["port"])  # it has rank 0
    if plan.by == "host":
        made: list[Message] = []
        first = 0
        for host in hosts_of(plan, agents):
            count = plan.counts.value[host]
            made.append(plan.start_command(first, count, shared, host))
            first += count
        return made
    by_host: dict[str, list[RemoteAgent]] = {}
    for agent in agents:
        by_host.setdefault(agent.host, []).append(agent)
    made = []
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


def hosts_of(plan: LaunchSpec, agents: list[RemoteAgent]) -> list[int]:
    """The place in the plan of each agent's host, one agent a host. The launcher backend may have numbered them in
    another order. Where names are others here and there, they are taken to be in the plan's."""
    planned = {hosts.host_key(name): place for place, name in enumerate(plan.hosts.value)}
    names = [hosts.host_key(agent.host) for agent in agents]
    if sorted(names) == sorted(planned):
        return [planned[name] for name in names]
    return list(range(len(agents)))


def read_failure(data: dict[str, Any], host: str, now: float) -> Failure:
    """A failure as a host sends it. Its clock is not ours: its time is how long ago."""
    report = Report(**data["report"]) if data["report"] else None
    return Failure(**data | {"time": now - data["time"], "report": report, "host": data["host"] or host})


def write_failure(failure: Failure, now: float) -> dict[str, Any]:
    """The inverse of `read_failure`, on the host."""
    return asdict(failure) | {"time": now - failure.time}


def addresses(plan: LaunchSpec) -> list[str]:
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
