"""Ranks on many hosts: agents connect, prove that they are of the run, and take commands.

What mpiexec or srun starts (`mmm_launch.host.agent`, once a rank or once a host) connects back. When all have, each is
told to go. From then on launch learns over these connections which rank ended how, and sends its commands over them: no
MPI has to pass on a signal, or to kill survivors. A process that loses its connection to launch ends its ranks itself.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from mmm_launch.channel.commands import RemoteAgent, read_failure
from mmm_launch.channel.failures import Failure, say, signal_name
from mmm_launch.channel.handshake import Reception
from mmm_launch.channel.link import Lost, Message
from mmm_launch.errors import LaunchError
from mmm_launch.run.control import Run, Transport
from mmm_launch.run.stacks import Stack
from mmm_launch.spec import mpi
from mmm_launch.spec.launch_spec import LaunchSpec

START_TIMEOUT = 300.0  # s until every process has connected
LAST_WORDS = 3.0  # s beyond the grace that hosts have to say that their ranks are gone
LAUNCHER_END = 1.5  # s that mpiexec or srun has to end once its processes have
LOCATE = 2.0  # s for the hosts to say where their ranks are


class RemoteRanks(Transport):
    """Ranks over links to agents. `OneBackend` and `BackendPerHost` say who starts these, and when they are told to go.

    Attributes:
        plan: what is started.
        start_timeout: s in which all agents have to be there.
        token: by which they prove that they are of this run.
        addresses: and ports at which they find launch.
        reception: takes them in.
        connections: agents by file descriptor. agents: those that have said hello, by index.
        under_way: they have been told to go.
        pending: signals for ranks that are not there yet.
        stacks: where ranks of a run that hangs are. silent: agents that have not said so.
    """

    run: Run
    margin = LAST_WORDS

    def __init__(self, plan: LaunchSpec, start_timeout: float = START_TIMEOUT) -> None:
        self.plan, self.start_timeout = plan, start_timeout
        self.token = secrets.token_hex(16)
        self.addresses: list[list[Any]] = []
        self.reception: Reception | None = None
        self.connections: dict[int, RemoteAgent] = {}
        self.agents: dict[int, RemoteAgent] = {}
        self.under_way = False
        self.pending: list[int] = []
        self.stacks: dict[int, Stack] = {}
        self.silent: set[int] = set()

    @abstractmethod
    def expected(self) -> int:
        """How many agents have not connected yet."""

    @abstractmethod
    def join(self, agent: RemoteAgent) -> None:
        """Take in an agent that has said hello."""

    @abstractmethod
    def drop(self, agent: RemoteAgent) -> None:
        """An agent's connection is over."""

    @abstractmethod
    def too_late(self) -> None:
        """Not all agents have come in time."""

    def start_backend(self, command: list[str], **told: int) -> subprocess.Popen:
        """Have the launcher backend start agents, `told` this beside where launch is. Raises `LaunchError`."""
        plan, output = self.plan, self.run.output
        launcher = plan.launcher.value
        entry = {"at": self.addresses, "token": self.token, "launcher": launcher, "port": plan.wished_port, **told}
        if plan.stage is not None:
            entry["stage"] = asdict(plan.stage)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output.stdout if output is not None else None,
                stderr=output.stderr if output is not None else None,
                start_new_session=True,
                env={**os.environ, **plan.environ, mpi.AGENT_VARIABLE: json.dumps(entry)},
            )
        except OSError as error:
            raise LaunchError(
                f"{command[0]}, which is to start the ranks ({plan.launcher.source}), cannot be run: "
                f"{error.strerror}.\n  Load the site's module for it, or run on this host alone: "
                "--scheduler none"
            ) from None

    def listen(self, own: list[str], processes: int) -> None:
        """Have agents connect here. own: this host's addresses, as the hosts know it."""
        local = all(address.startswith("127.") for address in own)
        server = socket.create_server((own[0] if local else "", 0), backlog=min(processes + 8, 4096))
        self.reception = Reception(server, self.token, self.run.selector)
        self.addresses = [[address, server.getsockname()[1]] for address in own]

    def clean_up(self) -> None:
        for agent in self.connections.values():
            agent.link.close()
        if self.reception is not None:
            self.reception.close()

    def take_in(self, ready: set[int]) -> None:
        self.welcome(ready)
        for fd in ready & self.connections.keys():
            if fd in self.connections:
                self.hear(self.connections[fd])

    def welcome(self, ready: set[int]) -> None:
        """Take in the agents that have proven that they are of this run."""
        assert self.reception is not None
        refused = self.reception.refused
        for link in self.reception.welcome(ready, self.expected()):
            self.connections[link.fileno()] = RemoteAgent(link)
            self.run.selector.register(link, selectors.EVENT_READ)
        if self.reception.refused and not refused:
            say("launch: a connection without this run's token was refused")  # once: there may be many
        self.run.clocks.set(self.refuse, self.reception.deadline())

    def refuse(self) -> None:
        """A connection has not proven itself in time."""
        self.welcome(set())

    def hear(self, agent: RemoteAgent) -> None:
        try:
            for message in agent.link.read():
                if agent.index >= 0:
                    self.on_message(agent, message)
                else:
                    self.on_hello(agent, message)
        except Lost as lost:
            self.lose(agent, lost)

    def lose(self, agent: RemoteAgent, lost: Lost) -> None:
        self.drop(agent)
        if agent.index >= 0 and not agent.done:
            self.on_lost(agent, str(lost))

    def disconnect(self, agent: RemoteAgent) -> None:
        self.run.selector.unregister(agent.link)
        del self.connections[agent.link.fileno()]
        agent.link.close()

    def on_hello(self, agent: RemoteAgent, message: Message) -> None:
        """A new agent names itself."""
        agent.hello = message["hello"]
        agent.host = agent.hello["host"]
        if "error" in agent.hello:
            self.run.failed(Failure.of_user(0, agent.hello["error"]))
            with contextlib.suppress(Lost):
                agent.link.send({"kill": True})
        else:
            self.join(agent)

    def command(self, commands: Iterable[tuple[RemoteAgent, Message]]) -> None:
        """All are ready: tell each what to run."""
        self.under_way = True
        self.run.ranks_started()
        for agent, message in commands:
            agent.ranks, agent.done = [int(rank["RANK"]) for rank in message["ranks"]], False
            try:
                agent.link.send({"go": message})
            except Lost as lost:
                self.lose(agent, lost)
        for number in self.pending:
            self.tell({"signal": number})
        self.pending = []

    def on_message(self, agent: RemoteAgent, message: Message) -> None:
        now = time.monotonic()
        if "failure" in message:
            self.run.failed(read_failure(message["failure"], agent.host, now))
        elif "ended" in message:
            self.run.rank_ended(message["ended"])
        elif "interrupted" in message:
            number = message["interrupted"]
            text = (
                f"{signal_name(number)} came to the ranks on {agent.host}, and not from launch: the scheduler, or "
                f"{self.plan.launcher.value}, ends the run"
            )
            self.run.failed(Failure(min(agent.ranks, default=0), 128 + number, 0.0, 0, text=text, final=True))
        elif "saves" in message:
            self.run.will_save()
        elif "stacks" in message:
            self.stacks.update({int(rank): tuple(stack) for rank, stack in message["stacks"].items()})
            self.silent.discard(agent.index)
            if not self.silent and self.run.clocks.is_set(self.all_located):
                self.run.clocks.set(self.all_located, now)
        elif "bye" in message:
            agent.done = True

    def on_lost(self, agent: RemoteAgent, reason: str) -> None:
        """An agent is gone that has not said bye: its host is down or cut off, or somebody has killed it."""
        ranks = [rank for rank in agent.ranks if rank not in self.run.ended]
        which = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
        text = f"lost {which} on {agent.host}: the connection to launch broke ({reason})"
        self.run.failed(
            Failure(ranks[0] if ranks else 0, 1, time.monotonic(), 0, text=text, host=agent.host, lost=reason)
        )
        for rank in ranks:
            self.run.rank_ended(rank)

    def end(self, number: int, reason: str, grace: float | None) -> bool:
        """The hosts see to the grace of their ranks; launch waits for them a little longer."""
        if self.under_way:
            self.tell({"end": number, "reason": reason, "grace": grace})
        return self.under_way

    def forward(self, number: int) -> None:
        if self.under_way:
            self.tell({"signal": number})
        else:
            self.pending.append(number)

    def tell(self, message: Message) -> None:
        for agent in [m for m in self.connections.values() if not m.done]:
            with contextlib.suppress(Lost):  # `hear` will see it too
                agent.link.send(message)

    def locate(self) -> None:
        self.silent = {agent.index for agent in self.connections.values() if not agent.done}
        self.run.clocks.set(self.all_located, time.monotonic() + LOCATE)
        self.tell({"where": True})

    def all_located(self) -> None:
        """Every agent has said where its ranks are, or has had its time."""
        self.run.located(self.stacks, {rank: agent.host for agent in self.agents.values() for rank in agent.ranks})
