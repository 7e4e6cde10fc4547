"""launch's part in `--stage`: one process of each host makes the copy; launch says who gets it from whom.

The first host finds out what the source has, and reads it, once. Every host says whether it has a copy of just that.
The others form a tree below the first, in which each passes on what it gets while it gets it: the time does not grow
with their number.
"""

import contextlib
import time
from typing import Any

from mmm.launch.channel.commands import RemoteAgent, addresses
from mmm.launch.channel.failures import Failure, say
from mmm.launch.channel.link import Lost, Message
from mmm.launch.plan.launch_plan import LaunchPlan

FANOUT = 2  # hosts that one host serves


class Staging:
    """From the moment all `agents` (by index) are there, to the removal. `failures` gets what goes wrong."""

    def __init__(self, plan: LaunchPlan, agents: list[RemoteAgent], failures: list[Failure]) -> None:
        assert plan.stage is not None
        self.stage, self.suffix = plan.stage, plan.machine.value.host_suffix
        self.agents, self.failures = agents, failures
        self.addresses = addresses(plan)
        self.released = False
        self.began = time.monotonic()
        self.stagers: dict[str, RemoteAgent] = {}  # host → the process that makes its copy, the first host's first
        for agent in agents:
            self.stagers.setdefault(agent.host, agent)
        self.source: Message = {}
        self.ports: dict[str, int] = {}
        self.staged: dict[str, str] = {}  # host → path
        self.waiting: set[str] = set()

    def begin(self) -> None:
        self.ask(next(iter(self.stagers)), do="scan", path=self.stage.source)

    def ask(self, host: str, **what: Any) -> None:
        self.waiting.add(host)
        try:
            self.stagers[host].link.send({"stage": what})
        except Lost as lost:
            self.lost(self.stagers[host], str(lost))

    def hear(self, agent: RemoteAgent, said: Message) -> bool:
        """Take in an answer. True once every host has the copy."""
        self.waiting.discard(agent.host)
        if "error" in said:
            self.fail(agent.host, f"--stage {self.stage.source}: {agent.host}: {said['error']}", said["doubt"])
        elif "key" in said:
            self.source = said
            is_local = all(address.startswith("127.") for address in self.addresses)
            at = self.addresses[0] if is_local else ""
            for host in self.stagers:
                self.ask(host, do="prepare", source=said, folder=self.stage.to, keep=self.stage.keep, listen_at=at)
        else:
            self.ports |= {agent.host: said["port"]} if "port" in said else {}
            self.staged |= {agent.host: said["copy"]} if "copy" in said else {}
        if self.waiting or self.failures:
            return False
        if len(self.staged) < len(self.stagers):
            self.transfer()
            return False
        hosts = f"{len(self.staged)} host{'s' * (len(self.staged) > 1)}"
        say(self.stage.done(hosts, self.source["files"], self.source["size"], time.monotonic() - self.began))
        return True

    def transfer(self) -> None:
        first, *others = self.stagers
        missing = [first, *(host for host in others if host not in self.staged)]
        for place, host in enumerate(missing):
            parent = missing[(place - 1) // FANOUT]
            children = max(0, min(FANOUT, len(missing) - 1 - FANOUT * place))
            known = self.reach(parent) if place else None
            self.ask(host, do="transfer", parent=known, children=children, unpack=host not in self.staged)

    def reach(self, host: str) -> list[list[Any]]:
        """Addresses at which other hosts may find it, with its port."""
        peer = self.stagers[host].link.socket.getpeername()[0]
        known = self.addresses if peer.startswith("127.") else [peer]
        names = dict.fromkeys([*known, host.partition(".")[0] + self.suffix, host])
        return [[name, self.ports[host]] for name in names]

    def lost(self, agent: RemoteAgent, reason: str) -> None:
        what = f"lost {agent.host} while {self.stage.source} was copied to it"
        self.fail(agent.host, f"{what}: the connection to launch broke ({reason})", 0)

    def fail(self, host: str, text: str, doubt: int) -> None:
        self.failures.append(Failure(0, 1, time.monotonic(), doubt, text=text, host=host))

    def release(self, again: bool) -> None:
        """Have the copies removed once no rank is left, unless there is another attempt."""
        if not self.released and all(agent.done or agent.link.fileno() < 0 for agent in self.agents):
            self.released = True
            for agent in self.stagers.values():
                with contextlib.suppress(Lost):
                    agent.link.send({"remove": not again and not self.stage.keep})

    def told(self, agent: RemoteAgent) -> Message:
        """What `agent` is told with its command to go."""
        return {"source": self.stage.source, "copy": self.staged[agent.host]}
