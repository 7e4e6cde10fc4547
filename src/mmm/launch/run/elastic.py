"""`launch --elastic MIN:MAX`: a rank or a host dies, and the ranks that are left go on from the last checkpoint.

    slots     A host has as many as it is to have ranks at most. The slot of a rank that was killed rests, a lost host
              is away; both are tried again, `rejoin` seconds after the last failure. The slot of a rank that failed by
              itself (an exception, an exit code) stays out: a program with a mistake ends after MAX - MIN + 1 attempts.
    attempt   A run of the program on so many ranks: as many as there are slots, at most MAX. CMD itself knows which
              numbers its layout takes: it refuses others by a `LayoutError`, before its ranks meet. Then the next lower
              number is tried, and that one never again. With fewer than MIN the run ends.
    growth    Slots have come back, and a larger number may do: the ranks get SIGUSR1, save, and exit with code 75
              (`mmm.contract.SAVED_EXIT`); the next attempt has them all. A program that knows no SIGUSR1 ignores it.

Every host has an agent of its own, which a launcher backend of its own has started: mpiexec would end all hosts with
one. On this host alone launch starts it itself. Agents and their fork servers outlive the attempts, so that new ranks
need no imports. Spare hosts have an agent too, and come last.
"""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace

from mmm import contract
from mmm.contract import SAVED_EXIT
from mmm.launch.channel import failures
from mmm.launch.channel.commands import RemoteAgent, addresses, slot_commands
from mmm.launch.channel.failures import Failure, say
from mmm.launch.channel.link import Lost, Message
from mmm.launch.plan import variables
from mmm.launch.plan.launch_plan import LaunchPlan, Value
from mmm.launch.run import processes
from mmm.launch.run.control import Limits
from mmm.launch.run.controller import LAUNCHER_END
from mmm.launch.run.output import Output
from mmm.launch.run.remote import LAST_WORDS, START_TIMEOUT, RemoteRun

SHORT_GRACE = 0.1  # s for the ranks that are left, when the run goes on without one that was killed


@dataclass
class Host:
    """One that ranks may run on. resting, out: slots that have no rank for now, and for good."""

    name: str
    index: int
    launcher: subprocess.Popen | None = None  # that has started the agent, or tries to
    agent: RemoteAgent | None = None
    resting: set[int] = field(default_factory=set)
    out: set[int] = field(default_factory=set)

    def free(self, slots: int) -> list[tuple["Host", int]]:
        unused = self.resting | self.out
        return [(self, slot) for slot in range(slots) if slot not in unused] if self.agent is not None else []


class ElasticController(RemoteRun):
    """All attempts of one run. `retries`: how many failures it may go on after; None: any number."""

    def __init__(
        self,
        plan: LaunchPlan,
        limits: Limits | None = None,
        start_timeout: float = START_TIMEOUT,
        retries: int | None = None,
    ) -> None:
        super().__init__(plan, limits, start_timeout)
        assert plan.elastic is not None
        self.elastic, self.retries = plan.elastic, retries
        self.hosts = [Host(name, index) for index, name in enumerate(plan.agent_commands)]
        self.attempt = -1
        self.places: list[tuple[Host, int]] = []  # of the ranks
        self.fits: dict[int, bool] = {}  # number of ranks → whether CMD has taken it
        self.first: Failure | None = None  # of the attempt
        self.rejoin_at: float | None = None
        self.ask_at: float | None = None  # when the ranks are asked to save, for more of them to go on
        self.drop_at: float | None = None
        self.failed = 1  # exit code of the last attempt that has failed
        self.over = False

    def start(self) -> None:
        everywhere = replace(self.plan, hosts=Value(tuple(self.plan.agent_commands), ""))
        self.listen(addresses(everywhere), len(self.hosts))
        if self.plan.launcher.value != "direct" or self.limits.timeout is not None:
            self.output = Output(self.selector)
        self.call_hosts()

    def call_hosts(self) -> None:
        """Start an agent on each host that has none."""
        self.rendezvous_ends = time.monotonic() + self.start_timeout
        for host in self.hosts:
            if host.agent is None and host.launcher is None:
                host.launcher = self.start_backend(self.plan.agent_commands[host.name], index=host.index)

    def deadlines(self) -> list[float | None]:
        return [*super().deadlines(), self.rejoin_at, self.ask_at, self.drop_at]

    def serve(self) -> bool:
        now = self.listen_to_agents()
        for host in self.hosts:
            if host.launcher is not None and host.launcher.poll() is not None:
                host.launcher = None
        if self.drop_at is not None and now >= self.drop_at:
            self.drop_at = None
            for agent in [each for each in self.connections.values() if not each.done]:
                self.drop(agent)
        if self.under_way:
            if not any(host.agent is not None and not host.agent.done for host in self.hosts):
                self.attempt_over(now)
            else:
                self.look_for_more(now)
        elif self.exit_code is not None:
            self.over = True
        if not self.under_way and not self.over:
            self.assemble(now)
        return not self.over

    # The hosts.

    def expected(self) -> int:
        return sum(host.agent is None for host in self.hosts)

    def join(self, agent: RemoteAgent) -> None:
        host = self.hosts[agent.hello["index"]]
        if host.agent is not None:
            self.drop(agent)
            return
        agent.index, agent.done = host.index, True
        host.agent = self.agents[host.index] = agent

    def drop(self, agent: RemoteAgent) -> None:
        self.disconnect(agent)
        if agent.index >= 0:
            host = self.hosts[agent.index]
            host.agent = None
            host.resting.clear()
            self.stop_launcher_of(host)

    def stop_launcher_of(self, host: Host) -> None:
        if host.launcher is not None:
            processes.end(host.launcher.pid, "-", grace=0.0)
            host.launcher.wait()
            host.launcher = None

    def on_lost(self, agent: RemoteAgent, reason: str) -> None:
        if self.under_way:
            super().on_lost(agent, reason)

    def on_message(self, agent: RemoteAgent, message: Message) -> None:
        super().on_message(agent, message)
        left = [rank for rank in agent.ranks if rank not in self.ended]
        if "bye" in message and left and not self.failures:
            text = f"the process that held the ranks on {agent.host} is gone"
            self.failures.append(Failure(-1, 1, time.monotonic(), 0, text=text))
        if "bye" in message:
            self.ended.update(agent.ranks)

    # An attempt.

    def best(self) -> int | None:
        """With how many ranks the run may go on."""
        most = min(self.elastic.most, len(self.free()))
        return next((n for n in range(most, self.elastic.least - 1, -1) if self.fits.get(n, True)), None)

    def free(self) -> list[tuple[Host, int]]:
        slots = dict(zip(self.plan.hosts.value, self.plan.counts.value, strict=True))
        return [place for host in self.hosts for place in host.free(slots.get(host.name, self.plan.per_host))]

    def assemble(self, now: float) -> None:
        """Begin an attempt, once the hosts are there: all, at first; then enough."""
        awaited = [host for host in self.hosts if host.agent is None and host.launcher is not None]
        ranks = self.best()
        late = self.rendezvous_ends is not None and now >= self.rendezvous_ends
        if awaited and not late and (self.attempt < 0 or ranks is None):
            return
        self.rendezvous_ends = None
        if ranks is not None and self.exit_code is None:
            self.begin(ranks)
            return
        absent = [host.name for host in self.hosts if host.agent is None]
        said = f"; nothing is heard from {', '.join(absent)}" if absent else ""
        least = self.elastic.least
        say(f"launch: there is room for {len(self.free())} ranks, and --elastic asks for at least {least}{said}")
        self.exit_code, self.over = self.failed, True

    def begin(self, ranks: int) -> None:
        """Tell the hosts what to run."""
        self.attempt += 1
        self.total, self.places = ranks, self.free()[:ranks]
        self.failures, self.ended, self.first, self.termination_reason = [], set(), None, ""
        self.decide_at = self.kill_at = self.grace = self.ask_at = self.drop_at = None
        self.again = self.saves = False
        by_host: dict[int, list[int]] = {}
        for host, slot in self.places:
            by_host.setdefault(host.index, []).append(slot)
        plan = self.plan
        used = [self.hosts[index].name for index in by_host]
        master = variables.master(os.environ, plan.job, plan.machine.value, used, self.attempt)
        shared = replace(plan, shared=plan.shared | master).variables
        first = self.hosts[self.places[0][0].index].agent
        if plan.wished_port is not None and first is not None:
            shared["MASTER_PORT"] = str(first.hello["port"])
        shared |= {"WORLD_SIZE": str(ranks), contract.ATTEMPT_VARIABLE: str(self.attempt)}
        shared[contract.ELASTIC_VARIABLE] = f"{self.elastic.least}:{self.elastic.most}"
        if self.attempt:  # whose start-up is its own
            shared |= {contract.BEGAN_VARIABLE: repr(time.time()), contract.STARTED_VARIABLE: ""}
        commands = slot_commands(plan, by_host, shared)
        self.command([(self.agents[index], message) for index, message in commands.items()])

    def fail(self) -> None:
        self.first, known = failures.cause(self.failures), list(self.failures)
        self.after_failure = SHORT_GRACE if self.goes_on(self.first, known) else None
        super().fail()
        if self.first.exit_code == SAVED_EXIT or (self.first.report is not None and self.first.report.is_users):
            return
        for failure in known:
            killed = failure.report is None and failure.exit_code > 128
            if 0 <= failure.rank < self.total and (failure is self.first or (killed and not failure.doubt)):
                host, slot = self.places[failure.rank]
                if host.agent is not None:
                    (host.resting if killed or failure.doubt else host.out).add(slot)

    def goes_on(self, first: Failure, known: list[Failure]) -> bool:
        """Whether enough ranks are left after one that was killed: the others have nothing to save or to say."""
        left = len(self.free()) - len(known)
        return first.report is None and first.exit_code > 128 and self.retries != 0 and left >= self.elastic.least

    def attempt_over(self, now: float) -> None:
        """No rank is left: what is next?"""
        if self.exit_code is None and self.failures:
            self.fail()
        self.under_way, self.kill_at = False, None
        if self.exit_code is None:
            self.exit_code = 0
        report = self.first.report if self.first is not None else None
        refused = report is not None and report.kind == "layout" and not self.fits.get(self.total)
        if refused and (self.attempt or self.total < self.elastic.most):
            self.fits[self.total] = False
        else:
            saved = self.exit_code == SAVED_EXIT
            if not self.again or (self.retries == 0 and not saved):
                self.over = True
                return
            self.fits[self.total] = True
            if not saved:
                self.retries = None if self.retries is None else self.retries - 1
                self.rejoin_at = now + self.elastic.rejoin
        code, self.failed, self.exit_code = self.exit_code, self.exit_code, None
        self.failures, self.decide_at = [], None
        if (ranks := self.best()) is None:
            self.call_hosts()
        else:
            left = "" if self.retries is None else f"; --retries: {self.retries} left"
            text = f"{self.total} ranks do not fit" if refused else f"exit code {code}"
            say(f"launch: {text}: going on with {ranks} ranks (--elastic{left})")

    def look_for_more(self, now: float) -> None:
        """Try again what was left out; with more slots, ask the ranks to save."""
        if self.exit_code is not None or self.failures or self.signalled:
            return
        if self.rejoin_at is not None and now >= self.rejoin_at:
            for host in self.hosts:
                host.resting.clear()
            self.call_hosts()
            self.rendezvous_ends = self.rejoin_at = None
        if self.rejoin_at is None and any(host.agent is None for host in self.hosts):
            self.rejoin_at = now + self.elastic.rejoin
        more = self.best()
        if more is not None and more > self.total and (self.ask_at is None or now >= self.ask_at):
            if self.ask_at is None:
                say(f"launch: there is room for {more} ranks: {self.total} are to save (SIGUSR1)")
            self.ask_at = now + self.elastic.rejoin
            self.forward_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self.tell({"kill": True})
        self.kill_at, self.drop_at = None, time.monotonic() + LAUNCHER_END

    # The end.

    def finish(self) -> int:
        self.stop_hosts()
        if self.output is not None:
            self.output.started()
            self.output.drain(self.selector, time.monotonic() + 1.0)
        assert self.exit_code is not None
        return self.exit_code

    def clean_up(self) -> None:
        self.stop_hosts()
        super().clean_up()

    def stop_hosts(self) -> None:
        for agent in list(self.connections.values()):
            with contextlib.suppress(Lost):
                agent.link.send({"quit": True})
        deadline = time.monotonic() + LAST_WORDS
        for host in self.hosts:
            if host.launcher is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    host.launcher.wait(max(0.0, deadline - time.monotonic()))
            self.stop_launcher_of(host)
        for agent in list(self.connections.values()):
            self.drop(agent)
