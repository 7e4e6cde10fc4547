"""Ranks on many hosts, whose agents one mpiexec or srun starts: all are waited for, and told to go together."""

import subprocess
import time

from mmm_launch.channel import failures
from mmm_launch.channel.commands import RemoteAgent, addresses, start_commands
from mmm_launch.channel.failures import Failure
from mmm_launch.contract import open_files
from mmm_launch.errors import LaunchError
from mmm_launch.run import processes
from mmm_launch.run.control import Run, RunState
from mmm_launch.run.output import Output
from mmm_launch.run.remote import LAUNCHER_END, START_TIMEOUT, RemoteRanks
from mmm_launch.spec import hosts
from mmm_launch.spec.launch_spec import LaunchSpec

REMOVAL = 60.0  # s that hosts have to remove their copies of --stage
UNPACKING_END = 20.0  # s that hosts have to finish a copy that nobody needs any more, and to remove it
LAUNCHER_LINGERS = 20.0  # s that it has after a run that went well: others of its processes may still write
SPARE_FILES = 64


class OneBackend(RemoteRanks):
    """Its end is that of mpiexec or srun.

    Attributes:
        launcher: mpiexec or srun. has_ended: it is gone.
        heard: hosts whose agents have connected, as `hosts.host_key` has them.
    """

    def __init__(self, plan: LaunchSpec, start_timeout: float = START_TIMEOUT) -> None:
        super().__init__(plan, start_timeout)
        self.launcher: subprocess.Popen | None = None
        self.has_ended = False
        self.heard: set[str] = set()

    def start(self, run: Run) -> None:
        self.run, plan = run, self.plan
        limit = open_files()
        if plan.processes + SPARE_FILES > limit:
            raise LaunchError(
                f"{plan.processes} ranks each hold a connection to launch, which may open {limit} files "
                "(ulimit -Hn).\n  Use --ranks-by host: one connection a host."
            )
        self.listen(addresses(plan), plan.processes)
        run.output = Output(run.selector)
        run.clocks.set(self.too_late, time.monotonic() + self.start_timeout)
        self.launcher = self.start_backend(plan.command, processes=plan.processes)
        run.output.started()

    def clean_up(self) -> None:
        if self.launcher is not None and self.launcher.returncode is None:
            self.stop_launcher()
        super().clean_up()

    def advance(self) -> bool:
        """True once the launcher backend has ended and nobody is connected."""
        run = self.run
        assert self.launcher is not None
        if self.launcher.poll() is None:
            return False
        if not self.has_ended:  # the last words of the ranks may be on their way
            self.has_ended = True
            run.clocks.set(self.launcher_is_gone, time.monotonic() + LAUNCHER_END)
        awaited = run.clocks.is_set(self.launcher_is_gone) or run.clocks.is_set(run.kill)
        return not (self.connections and awaited)

    def launcher_is_gone(self) -> None:
        assert self.launcher is not None
        if self.connections and self.run.state is not RunState.ENDING:
            reason, code = failures.end_of_process(self.launcher.returncode)
            self.run.give_up(f"{self.plan.command[0]} {reason} while its ranks ran", code)

    def too_late(self) -> None:
        if self.run.state is RunState.STARTING:
            self.run.silent_hosts = self.silent_hosts()
            self.run.give_up(f"after {self.start_timeout:g} s {self.missing()}", 1)

    def expected(self) -> int:
        return self.plan.processes - len(self.agents)

    def drop(self, agent: RemoteAgent) -> None:
        self.disconnect(agent)
        decided = self.run.state is RunState.ENDING
        if self.plan.stage is not None and not self.under_way:
            return  # others may still unpack; they connect, and are told to end
        if not self.connections and (self.under_way or decided):
            self.stop_launcher_in(LAUNCHER_END if decided else LAUNCHER_LINGERS)

    def join(self, agent: RemoteAgent) -> None:
        index, world, wanted = agent.hello["rank"], agent.hello["world"], self.plan.processes
        launcher = self.plan.launcher.value
        if world != wanted or index in self.agents:
            text = f"{launcher} has started {world} processes where {wanted} were asked for"
            if world == wanted:
                text = f"{launcher} has started rank {index} on {self.agents[index].host} and on {agent.host}"
            text += ": its options (--launcher-args) contradict launch's."
            self.run.failed(Failure.of_user(index, text))
            return
        agent.index = index
        self.agents[index] = agent
        self.heard.add(hosts.host_key(agent.host))
        if self.run.state is RunState.ENDING:
            # It has unpacked an environment while another host could not, or launch was told to end.
            self.tell({"kill": True})
        if not self.expected() and self.run.state is RunState.STARTING:
            self.run.clocks.clear(self.too_late)
            self.go()

    def in_order(self) -> list[RemoteAgent]:
        """All agents, by the launcher backend's own numbers."""
        return [self.agents[index] for index in range(len(self.agents))]

    def go(self) -> None:
        agents = self.in_order()
        commands = start_commands(self.plan, agents)
        self.command(zip(agents, commands, strict=True))

    def on_lost(self, agent: RemoteAgent, reason: str) -> None:
        if self.under_way:
            super().on_lost(agent, reason)
        else:
            del self.agents[agent.index]  # the launcher backend will say more, or the rendezvous times out

    def silent_hosts(self) -> list[str]:
        """Hosts from which nothing was heard."""
        return [name for name in self.plan.hosts.value if hosts.host_key(name) not in self.heard]

    def missing(self) -> str:
        """Who has not connected."""
        silent = [name for name in self.silent_hosts() if not hosts.is_here(name)]
        where = f"; nothing was heard from {', '.join(silent[:8])}{' …' if len(silent) > 8 else ''}" if silent else ""
        return (
            f"{self.expected()} of {self.plan.processes} processes that {self.plan.launcher.value} was to start have "
            f"not connected to launch{where}"
        )

    def end(self, number: int, reason: str, grace: float | None) -> bool:
        there = super().end(number, reason, grace)
        if there and not self.connections:
            self.stop_launcher_in(LAUNCHER_END)
        return there

    def kill(self) -> None:
        self.tell({"kill": True})
        patience = LAUNCHER_END if self.under_way else 0.0
        is_second = self.run.clocks.is_set(self.stop_launcher)  # Ctrl-C again: at once
        if self.plan.stage is not None and not is_second:
            patience = REMOVAL if self.under_way else UNPACKING_END
        self.stop_launcher_in(patience)

    def stop_launcher_in(self, seconds: float) -> None:
        self.run.clocks.set(self.stop_launcher, time.monotonic() + seconds)

    def stop_launcher(self) -> None:
        """End mpiexec or srun, and what it has started on this host."""
        assert self.launcher is not None
        grace = 0.5 if self.plan.stage is None else UNPACKING_END
        processes.end(self.launcher.pid, "-", grace)
        self.launcher.wait()

    def finish(self) -> tuple[str, int]:
        assert self.launcher is not None
        assert self.run.output is not None
        reason, code = failures.end_of_process(self.launcher.wait())
        self.run.output.drain()
        what = "while its ranks ran"
        if not self.under_way:
            self.run.silent_hosts = self.silent_hosts()
            what = f"before the ranks could start: {self.missing()}"
        return f"{self.plan.command[0]} {reason} {what}", code
