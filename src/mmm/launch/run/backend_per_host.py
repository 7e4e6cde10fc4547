"""The ranks of an elastic run: every host has an agent of its own, which a launcher backend of its own has started.

One mpiexec for all would end all hosts with one. On this host alone launch starts the agent itself. Agents and their
fork servers outlive the attempts, so that new ranks need no imports. Spare hosts have an agent too, and come last.
"""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace

from mmm.launch import contract
from mmm.launch.channel.commands import RemoteAgent, addresses, slot_commands
from mmm.launch.channel.failures import Failure, say
from mmm.launch.channel.link import Lost, Message
from mmm.launch.plan import variables
from mmm.launch.plan.launch_plan import LaunchPlan, Value
from mmm.launch.run import processes
from mmm.launch.run.attempts import Attempts
from mmm.launch.run.control import Run, RunState
from mmm.launch.run.output import Output
from mmm.launch.run.remote import LAST_WORDS, LAUNCHER_END, START_TIMEOUT, RemoteRanks


class BackendPerHost(RemoteRanks):
    """All attempts of one run.

    Attributes:
        attempts: says which slots have a rank.
        launchers: those that run, by the index of their host.
    """

    def __init__(self, plan: LaunchPlan, attempts: Attempts, start_timeout: float = START_TIMEOUT) -> None:
        super().__init__(plan, start_timeout)
        self.attempts = attempts
        self.launchers: dict[int, subprocess.Popen] = {}

    def start(self, run: Run) -> None:
        self.run = run
        everywhere = replace(self.plan, hosts=Value(tuple(self.plan.agent_commands), ""))
        self.listen(addresses(everywhere), len(self.attempts.hosts))
        if self.plan.launcher.value != "direct" or run.limits.timeout is not None:
            run.output = Output(run.selector)
        self.call_hosts()

    def call_hosts(self) -> None:
        """Start an agent on each host that has none."""
        self.run.clocks.set(self.too_late, time.monotonic() + self.start_timeout)
        for host in self.attempts.hosts:
            if not host.is_there and host.index not in self.launchers:
                command = self.plan.agent_commands[host.name]
                self.launchers[host.index] = self.start_backend(command, index=host.index)

    # The hosts.

    def expected(self) -> int:
        return sum(not host.is_there for host in self.attempts.hosts)

    def join(self, agent: RemoteAgent) -> None:
        host = self.attempts.hosts[agent.hello["index"]]
        if host.is_there:
            self.drop(agent)
            return
        agent.index, agent.done = host.index, True
        host.is_there, self.agents[host.index] = True, agent

    def drop(self, agent: RemoteAgent) -> None:
        self.disconnect(agent)
        if agent.index >= 0:
            host = self.attempts.hosts[agent.index]
            host.is_there = False
            host.resting.clear()
            self.stop_launcher(agent.index)

    def stop_launcher(self, index: int) -> None:
        if launcher := self.launchers.pop(index, None):
            processes.end(launcher.pid, "-", grace=0.0)
            launcher.wait()

    def on_lost(self, agent: RemoteAgent, reason: str) -> None:
        if self.under_way:
            super().on_lost(agent, reason)

    def on_message(self, agent: RemoteAgent, message: Message) -> None:
        super().on_message(agent, message)
        if "bye" in message:
            if not self.run.ended.issuperset(agent.ranks) and not self.run.failures:
                text = f"the process that held the ranks on {agent.host} is gone"
                self.run.failed(Failure(-1, 1, time.monotonic(), 0, text=text))
            self.run.ended.update(agent.ranks)

    # An attempt.

    def advance(self) -> bool:
        for index, launcher in list(self.launchers.items()):
            if launcher.poll() is not None:
                del self.launchers[index]
        if self.under_way:
            if all(agent.done or not self.attempts.hosts[index].is_there for index, agent in self.agents.items()):
                self.under_way = False
                return True
            self.look_for_more()
        elif self.run.state is RunState.STARTING:
            self.assemble()
        return not self.under_way and self.run.state is RunState.ENDING

    def too_late(self) -> None:
        if self.run.state is RunState.STARTING:
            self.assemble(is_late=True)

    def assemble(self, is_late: bool = False) -> None:
        """Begin an attempt, once the hosts are there: all, at first; then enough. End the run if they will not be."""
        ranks = self.attempts.best()
        if ranks is None and not is_late and not self.run.clocks.is_set(self.too_late):
            self.call_hosts()
        awaited = any(not self.attempts.hosts[index].is_there for index in self.launchers)
        if awaited and not is_late and (self.attempts.number < 0 or ranks is None):
            return
        self.run.clocks.clear(self.too_late)
        if ranks is not None:
            self.begin(ranks)
        else:
            say(f"launch: {self.attempts.too_few()}")
            self.run.ends(self.attempts.exit_code, again=False)

    def begin(self, ranks: int) -> None:
        """Tell the hosts what to run."""
        run, plan, attempts = self.run, self.plan, self.attempts
        by_host = attempts.begin(ranks)
        run.renew(ranks)
        run.clocks.clear(self.ask_to_save, self.drop_silent)
        used = [attempts.hosts[index].name for index in by_host]
        master = variables.master(os.environ, plan.job, plan.machine.value, used, attempts.number)
        shared = replace(plan, shared=plan.shared | master).variables
        if plan.wished_port is not None:
            shared["MASTER_PORT"] = str(self.agents[next(iter(by_host))].hello["port"])
        shared |= {"WORLD_SIZE": str(ranks), contract.ATTEMPT_VARIABLE: str(attempts.number)}
        shared[contract.ELASTIC_VARIABLE] = f"{attempts.bounds.least}:{attempts.bounds.most}"
        if attempts.number:  # whose start-up is its own
            shared |= {contract.BEGAN_VARIABLE: repr(time.time()), contract.STARTED_VARIABLE: ""}
        commands = slot_commands(plan, by_host, shared)
        self.command([(self.agents[index], message) for index, message in commands.items()])
        self.rejoin_if_absent()

    def is_quiet(self) -> bool:
        """Whether the attempt goes on as it should."""
        return self.run.state is RunState.RUNNING and not self.run.failures and not self.run.signalled

    def rejoin_if_absent(self) -> None:
        """Have what was left out be tried again, in time."""
        attempts = self.attempts
        if attempts.rejoin_at is None and self.expected():
            attempts.rejoin_at = time.monotonic() + attempts.bounds.rejoin
        self.run.clocks.set(self.rejoin, attempts.rejoin_at)

    def rejoin(self) -> None:
        """Try again what was left out; in the next attempt, if this one is about to end."""
        if self.is_quiet():
            for host in self.attempts.hosts:
                host.resting.clear()
            self.call_hosts()
            self.run.clocks.clear(self.too_late)
            self.attempts.rejoin_at = None
            self.rejoin_if_absent()

    def look_for_more(self) -> None:
        """With more slots, have the ranks save, for more of them to go on."""
        more = self.attempts.best()
        if self.run.clocks.is_set(self.ask_to_save) or more is None or more <= self.run.total or not self.is_quiet():
            return
        say(f"launch: there is room for {more} ranks: {self.run.total} are to save (SIGUSR1)")
        self.ask_to_save()

    def ask_to_save(self) -> None:
        """Until they have: one that is still starting may not have heard it."""
        if self.is_quiet():
            self.forward(signal.SIGUSR1)
            self.run.clocks.set(self.ask_to_save, time.monotonic() + self.attempts.bounds.rejoin)

    def kill(self) -> None:
        self.tell({"kill": True})
        self.run.clocks.set(self.drop_silent, time.monotonic() + LAUNCHER_END)

    def drop_silent(self) -> None:
        """Those whose ranks should be gone, and that have not said so."""
        for agent in [agent for agent in self.connections.values() if not agent.done]:
            self.drop(agent)

    # The end.

    def finish(self) -> tuple[str, int]:
        """Agents outlive an attempt, and say how each rank has ended."""
        return "", 0

    def clean_up(self) -> None:
        for agent in list(self.connections.values()):
            with contextlib.suppress(Lost):
                agent.link.send({"quit": True})
        deadline = time.monotonic() + LAST_WORDS
        for index, launcher in list(self.launchers.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, deadline - time.monotonic()))
            self.stop_launcher(index)
        for agent in list(self.connections.values()):
            self.drop(agent)
        if self.run.output is not None:
            self.run.output.started()
            self.run.output.drain()
        super().clean_up()
