"""launch's own part of a run on many hosts: starts mpiexec or srun, waits for the agents, ends every rank everywhere.

What mpiexec or srun starts (`mmm.launch.host.agent`, once a rank or once a host) connects back. When all have, each is
told to go. From then on launch learns over these connections which rank ended how, and sends its commands over them: no
MPI has to pass on a signal, or to kill survivors. A process that loses its connection to launch ends its ranks itself.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from typing import Any

from mmm.contract import open_files
from mmm.errors import LaunchError
from mmm.launch.channel import failures
from mmm.launch.channel.commands import RemoteAgent, addresses, read_failure, start_commands
from mmm.launch.channel.failures import Failure, say, signal_name
from mmm.launch.channel.handshake import Reception
from mmm.launch.channel.link import Lost, Message
from mmm.launch.control import processes
from mmm.launch.control.output import Output
from mmm.launch.control.run import GRACE, Limits, RunControl
from mmm.launch.control.stacks import Stack
from mmm.launch.job import hosts, mpi
from mmm.launch.job.plan import LaunchPlan
from mmm.launch.staging.spread import Staging

START_TIMEOUT = 300.0  # s until every process has connected
LAST_WORDS = 3.0  # s beyond the grace that hosts have to say that their ranks are gone
LAUNCHER_END = 1.5  # s that mpiexec or srun has to end once its processes have
REMOVAL = 60.0  # s that hosts have to remove what --stage has copied
LOCATE = 2.0  # s for the hosts to say where their ranks are
LAUNCHER_LINGERS = 20.0  # s that it has after a run that went well: others of its processes may still write
SPARE_FILES = 64


class Controller(RunControl):
    def __init__(self, plan: LaunchPlan, limits: Limits | None = None, start_timeout: float = START_TIMEOUT) -> None:
        super().__init__(plan.ranks, limits)
        self.plan = plan
        self.start_timeout = start_timeout
        self.token = secrets.token_hex(16)
        self.at: list[list[Any]] = []  # addresses and ports at which agents find launch
        self.connections: dict[int, RemoteAgent] = {}  # by file descriptor
        self.agents: dict[int, RemoteAgent] = {}  # by index
        self.under_way = False  # every agent has connected and been told to go
        self.rendezvous_ends: float | None = None
        self.launcher_ended: float | None = None
        self.stop_launcher_at: float | None = None
        self.pending: list[int] = []  # signals for ranks that are not there yet
        self.stacks: dict[int, Stack] = {}  # of a run that hangs
        self.silent: set[int] = set()  # agents that have not sent theirs
        self.locate_until: float | None = None
        self.staging: Staging | None = None
        self.launcher: subprocess.Popen | None = None
        self.reception: Reception | None = None

    def start(self) -> None:
        plan = self.plan
        limit = open_files()
        if plan.processes + SPARE_FILES > limit:
            raise LaunchError(
                f"{plan.processes} ranks each hold a connection to launch, which may open {limit} files "
                "(ulimit -Hn).\n  Use --ranks-by host: one connection a host."
            )
        self.listen(addresses(plan), plan.processes)
        self.output = Output(self.selector)
        self.rendezvous_ends = time.monotonic() + self.start_timeout
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes `serve`
        self.launcher = self.start_backend(plan.command, processes=plan.processes)
        self.output.started()

    def start_backend(self, command: list[str], **told: int) -> subprocess.Popen:
        """Have the launcher backend start agents, `told` this beside where launch is. Raises `LaunchError`."""
        plan, output = self.plan, self.output
        launcher = plan.launcher.value
        entry = {"at": self.at, "token": self.token, "launcher": launcher, "port": plan.wished_port, **told}
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
        self.reception = Reception(server, self.token, self.selector)
        self.at = [[address, server.getsockname()[1]] for address in own]

    def clean_up(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self.launcher is not None and self.launcher.returncode is None:
            self.stop_launcher()
        for agent in self.connections.values():
            agent.link.close()
        if self.reception is not None:
            self.reception.close()
        if self.output is not None:
            self.output.close()

    def deadlines(self) -> list[float | None]:
        waiting = self.launcher_ended + LAUNCHER_END if self.launcher_ended is not None else None
        proof = self.reception.deadline() if self.reception is not None else None
        return [*super().deadlines(), self.rendezvous_ends, self.stop_launcher_at, self.locate_until, waiting, proof]

    def idle_at(self) -> float | None:
        return super().idle_at() if self.under_way else None  # nobody prints before every agent has

    def serve(self) -> bool:
        """Take in what has happened. False once the launcher backend has ended and nobody is connected."""
        now = self.listen_to_agents()
        if self.rendezvous_ends is not None and now >= self.rendezvous_ends and self.exit_code is None:
            self.rendezvous_ends = None
            self.give_up(f"after {self.start_timeout:g} s {self.missing()}", 1)
        if self.stop_launcher_at is not None and now >= self.stop_launcher_at:
            self.stop_launcher_at = None
            self.stop_launcher()
        assert self.launcher is not None
        if self.launcher.poll() is None:
            return True
        if self.launcher_ended is None:
            self.launcher_ended = now
        if self.connections and now < self.launcher_ended + LAUNCHER_END:
            return True  # the last words of the ranks may be on their way
        if self.connections and self.exit_code is None:
            self.launcher_died()
        return bool(self.connections) and self.kill_at is not None

    def listen_to_agents(self) -> float:
        """Take in what agents say, or that they are late with it. Returns the time, of `time.monotonic()`."""
        ready = self.wait()
        self.welcome(ready)
        for fd in ready & self.connections.keys():
            if fd in self.connections:
                self.hear(self.connections[fd])
        now = time.monotonic()
        if self.locate_until is not None and now >= self.locate_until:
            self.locate_until = None
            self.located(self.stacks, {rank: agent.host for agent in self.agents.values() for rank in agent.ranks})
        return now

    def welcome(self, ready: set[int]) -> None:
        """Take in the agents that have proven that they are of this run."""
        assert self.reception is not None
        refused = self.reception.refused
        for link in self.reception.welcome(ready, self.expected()):
            self.connections[link.fileno()] = RemoteAgent(link)
            self.selector.register(link, selectors.EVENT_READ)
        if self.reception.refused and not refused:
            say("launch: a connection without this run's token was refused")  # once: there may be many

    def expected(self) -> int:
        """How many agents have not connected yet."""
        return self.plan.processes - len(self.agents)

    def hear(self, agent: RemoteAgent) -> None:
        try:
            for message in agent.link.read():
                if agent.index >= 0:
                    self.on_message(agent, message)
                else:
                    self.on_hello(agent, message)
        except Lost as lost:
            self.drop(agent)
            if agent.index >= 0 and not agent.done:
                self.on_lost(agent, str(lost))

    def disconnect(self, agent: RemoteAgent) -> None:
        self.selector.unregister(agent.link)
        del self.connections[agent.link.fileno()]
        agent.link.close()

    def drop(self, agent: RemoteAgent) -> None:
        """An agent's connection is over."""
        self.disconnect(agent)
        if not self.connections and (self.under_way or self.exit_code is not None):
            left = LAUNCHER_END if self.exit_code is not None else LAUNCHER_LINGERS
            self.stop_launcher_at = time.monotonic() + left

    def on_hello(self, agent: RemoteAgent, message: Message) -> None:
        """A new agent names itself."""
        agent.hello = message["hello"]
        agent.host = agent.hello["host"]
        if "error" in agent.hello:
            self.failures.append(Failure.of_user(0, agent.hello["error"]))
        else:
            self.join(agent)

    def join(self, agent: RemoteAgent) -> None:
        """Take in an agent that has said hello."""
        index, world, wanted = agent.hello["rank"], agent.hello["world"], self.plan.processes
        launcher = self.plan.launcher.value
        if world != wanted or index in self.agents:
            text = f"{launcher} has started {world} processes where {wanted} were asked for"
            if world == wanted:
                text = f"{launcher} has started rank {index} on {self.agents[index].host} and on {agent.host}"
            text += ": its options (--launcher-args) contradict launch's."
            self.failures.append(Failure.of_user(index, text))
            return
        agent.index = index
        self.agents[index] = agent
        if len(self.agents) == self.plan.processes and self.exit_code is None:
            self.rendezvous_ends = None
            if self.plan.stage is None:
                self.go()
            else:
                self.staging = Staging(self.plan, [self.agents[i] for i in range(len(self.agents))], self.failures)
                self.staging.begin()

    def decide(self, now: float) -> None:
        super().decide(now)
        if self.staging is not None and self.under_way and (self.exit_code is not None or not self.failures):
            self.staging.release(again=self.again and self.attempts_left > 0)

    def go(self) -> None:
        """All are ready: tell each what to run."""
        self.under_way = True
        assert self.output is not None
        self.output.last = time.monotonic()
        agents = [self.agents[index] for index in range(len(self.agents))]
        for agent, message in zip(agents, start_commands(self.plan, agents), strict=True):
            agent.ranks = [int(rank["RANK"]) for rank in message["ranks"]]
            if self.staging is not None:
                message["stage"] = self.staging.told(agent)
            try:
                agent.link.send({"go": message})
            except Lost as lost:
                self.on_lost(agent, str(lost))
        for number in self.pending:
            self.send(number)

    def on_message(self, agent: RemoteAgent, message: Message) -> None:
        now = time.monotonic()
        if "failure" in message:
            self.failures.append(read_failure(message["failure"], agent.host, now))
        elif "ended" in message:
            self.ended.add(message["ended"])
        elif "interrupted" in message:
            number = message["interrupted"]
            text = (
                f"{signal_name(number)} came to the ranks on {agent.host}, and not from launch: the scheduler, or "
                f"{self.plan.launcher.value}, ends the run"
            )
            self.failures.append(Failure(min(agent.ranks, default=0), 128 + number, 0.0, 0, text=text, final=True))
        elif "saves" in message:
            self.saves = True
        elif "stacks" in message:
            self.stacks.update({int(rank): tuple(stack) for rank, stack in message["stacks"].items()})
            self.silent.discard(agent.index)
            if not self.silent and self.locate_until is not None:
                self.locate_until = now
        elif "stage" in message and self.staging is not None:
            if self.staging.hear(agent, message["stage"]) and self.exit_code is None:
                self.go()
        elif "bye" in message:
            agent.done = True
            agent.hello["port"] = message["port"]

    def on_lost(self, agent: RemoteAgent, reason: str) -> None:
        """An agent is gone that has not said bye: its host is down or cut off, or somebody has killed it."""
        if not self.under_way:
            if self.staging is not None:
                self.staging.lost(agent, reason)
            else:
                del self.agents[agent.index]  # the launcher backend will say more, or the rendezvous times out
            return
        ranks = [rank for rank in agent.ranks if rank not in self.ended]
        which = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
        text = f"lost {which} on {agent.host}: the connection to launch broke ({reason})"
        self.failures.append(Failure(ranks[0] if ranks else 0, 1, time.monotonic(), 0, text=text, host=agent.host))
        self.ended.update(ranks)

    def launcher_died(self) -> None:
        assert self.launcher is not None
        reason, code = failures.end_of_process(self.launcher.returncode)
        self.give_up(f"{self.plan.command[0]} {reason} while its ranks ran", code)

    def give_up(self, text: str, code: int) -> None:
        self.exit_code, self.again = code, True
        say(f"launch: {text}")
        self.end(signal.SIGTERM, text)

    def missing(self) -> str:
        """Who has not connected."""
        known = {agent.host.partition(".")[0] for agent in self.agents.values()}
        others = [name for name in self.plan.hosts.value if not hosts.is_here(name)]
        silent = [name for name in others if name.partition(".")[0] not in known]
        where = f"; nothing was heard from {', '.join(silent[:8])}{' …' if len(silent) > 8 else ''}" if silent else ""
        return (
            f"{self.expected()} of {self.plan.processes} processes that {self.plan.launcher.value} was to start have "
            f"not connected to launch{where}"
        )

    def send(self, number: int) -> bool:
        if not self.under_way:
            return False
        self.tell({"signal": number, "verdict": self.verdict, "grace": self.grace})
        return True

    def forward_signal(self, number: int) -> None:
        if not self.send(number):
            self.pending.append(number)

    def tell(self, message: Message) -> None:
        for agent in [m for m in self.connections.values() if not m.done]:
            with contextlib.suppress(Lost):  # `hear` will see it too
                agent.link.send(message)

    def locate(self) -> None:
        self.silent = {agent.index for agent in self.connections.values() if not agent.done}
        self.locate_until = time.monotonic() + LOCATE
        self.tell({"where": True})

    def end(self, number: int, verdict: str = "") -> None:
        """The hosts see to the grace of their ranks; launch waits for them a little longer."""
        self.verdict, self.kill_at = verdict, time.monotonic() + (self.grace or GRACE) + LAST_WORDS
        if not self.send(number):
            self.kill()
        elif not self.connections:
            self.stop_launcher_at = time.monotonic() + LAUNCHER_END

    def kill(self) -> None:
        self.tell({"kill": True})
        self.kill_at = None
        patience = LAUNCHER_END if self.under_way else 0.0
        self.stop_launcher_at = time.monotonic() + (patience if self.staging is None else REMOVAL)

    def stop_launcher(self) -> None:
        """End mpiexec or srun, and what it has started on this host."""
        assert self.launcher is not None
        processes.end(self.launcher.pid, "-", grace=0.5)
        self.launcher.wait()

    def finish(self) -> int:
        assert self.launcher is not None
        assert self.output is not None
        code = self.launcher.wait()
        self.output.drain(self.selector, time.monotonic() + 1.0)
        if self.exit_code is None and self.failures:
            self.fail()
        if self.exit_code is not None:
            return self.exit_code
        if len(self.ended) == self.total:
            return 0
        reason, code = failures.end_of_process(code)
        what = "while its ranks ran" if self.under_way else f"before the ranks could start: {self.missing()}"
        say(f"launch: {self.plan.command[0]} {reason} {what}")
        self.again = True
        return code
