"""One attempt on many hosts: mpiexec or srun is started, all agents are waited for, every rank is ended everywhere."""

import signal
import subprocess
import time

from mmm.contract import open_files
from mmm.errors import LaunchError
from mmm.launch.channel import failures
from mmm.launch.channel.commands import RemoteAgent, addresses, start_commands
from mmm.launch.channel.failures import Failure, say
from mmm.launch.channel.link import Message
from mmm.launch.plan import hosts
from mmm.launch.plan.launch_plan import LaunchPlan
from mmm.launch.run import processes
from mmm.launch.run.control import Limits
from mmm.launch.run.output import Output
from mmm.launch.run.remote import START_TIMEOUT, RemoteRun
from mmm.launch.staging.spread import Staging

LAUNCHER_END = 1.5  # s that mpiexec or srun has to end once its processes have
REMOVAL = 60.0  # s that hosts have to remove what --stage has copied
LAUNCHER_LINGERS = 20.0  # s that it has after a run that went well: others of its processes may still write
SPARE_FILES = 64


class Controller(RemoteRun):
    """One attempt, whose agents one launcher backend starts.

    Attributes:
        launcher_ended: when mpiexec or srun has ended. stop_launcher_at: when it is to be.
    """

    def __init__(self, plan: LaunchPlan, limits: Limits | None = None, start_timeout: float = START_TIMEOUT) -> None:
        super().__init__(plan, limits, start_timeout)
        self.launcher: subprocess.Popen | None = None
        self.launcher_ended: float | None = None
        self.stop_launcher_at: float | None = None
        self.staging: Staging | None = None

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
        self.launcher = self.start_backend(plan.command, processes=plan.processes)
        self.output.started()

    def clean_up(self) -> None:
        if self.launcher is not None and self.launcher.returncode is None:
            self.stop_launcher()
        super().clean_up()

    def deadlines(self) -> list[float | None]:
        waiting = self.launcher_ended + LAUNCHER_END if self.launcher_ended is not None else None
        return [*super().deadlines(), self.stop_launcher_at, waiting]

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
            reason, code = failures.end_of_process(self.launcher.returncode)
            self.give_up(f"{self.plan.command[0]} {reason} while its ranks ran", code)
        return bool(self.connections) and self.kill_at is not None

    def expected(self) -> int:
        return self.plan.processes - len(self.agents)

    def drop(self, agent: RemoteAgent) -> None:
        self.disconnect(agent)
        if not self.connections and (self.under_way or self.exit_code is not None):
            left = LAUNCHER_END if self.exit_code is not None else LAUNCHER_LINGERS
            self.stop_launcher_at = time.monotonic() + left

    def join(self, agent: RemoteAgent) -> None:
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
        agents = [self.agents[index] for index in range(len(self.agents))]
        commands = start_commands(self.plan, agents)
        if self.staging is not None:
            commands = [c | {"stage": self.staging.told(agent)} for c, agent in zip(commands, agents, strict=True)]
        self.command(zip(agents, commands, strict=True))

    def on_message(self, agent: RemoteAgent, message: Message) -> None:
        if "stage" in message and self.staging is not None:
            if self.staging.hear(agent, message["stage"]) and self.exit_code is None:
                self.go()
        else:
            super().on_message(agent, message)

    def on_lost(self, agent: RemoteAgent, reason: str) -> None:
        if self.under_way:
            super().on_lost(agent, reason)
        elif self.staging is not None:
            self.staging.lost(agent, reason)
        else:
            del self.agents[agent.index]  # the launcher backend will say more, or the rendezvous times out

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

    def end(self, number: int, termination_reason: str = "") -> None:
        super().end(number, termination_reason)
        if self.under_way and not self.connections:
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
