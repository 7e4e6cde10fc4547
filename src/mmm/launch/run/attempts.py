"""`launch --elastic MIN:MAX`: a rank or a host dies, and the ranks that are left go on from the last checkpoint.

    slots     A host has as many as it is to have ranks at most. The slot of a rank that was killed rests, a lost host
              is away; both are tried again, `rejoin` seconds after the last failure. The slot of a rank that failed by
              itself (an exception, an exit code) stays out: a program with a mistake ends after MAX - MIN + 1 attempts.
    attempt   A run of the program on so many ranks: as many as there are slots, at most MAX. CMD itself knows which
              numbers its layout takes: it refuses others by a `LayoutError`, before its ranks meet. Then the next lower
              number is tried, and that one never again. With fewer than MIN the run ends.
    growth    Slots have come back, and a larger number may do: the ranks get SIGUSR1, save, and exit with code 75
              (`contract.SAVED_EXIT`); the next attempt has them all. A program that knows no SIGUSR1 ignores it.

What holds the ranks is `mmm.launch.run.backend_per_host`'s.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmm.launch.channel.failures import Failure, say
from mmm.launch.contract import SAVED_EXIT
from mmm.launch.plan.launch_plan import LaunchPlan

SHORT_GRACE = 0.1  # s for the ranks that are left, when the run goes on without one that was killed


@dataclass
class Host:
    """One that ranks may run on. resting, out: slots that have no rank for now, and for good."""

    name: str
    index: int
    slots: int
    is_there: bool = False  # its agent has connected
    resting: set[int] = field(default_factory=set)
    out: set[int] = field(default_factory=set)


class Attempts:
    """Which slots may have a rank, and whether another attempt follows one that is over.

    Attributes:
        bounds: what --elastic asks for.
        retries: how many failures the run may go on after; None: any number.
        hosts: all, the spare ones last.
        number: of the attempt, from 0; −1: before the first.
        places: host and slot of each of its ranks.
        cause: the failure that has ended it.
        fits: number of ranks → whether CMD has taken it.
        rejoin_at: when what was left out is tried again, `time.monotonic()`.
        exit_code: of the last attempt that has failed.
    """

    def __init__(self, plan: LaunchPlan, retries: int | None = None) -> None:
        assert plan.elastic is not None
        self.bounds, self.retries = plan.elastic, retries
        slots = dict(zip(plan.hosts.value, plan.counts.value, strict=True))
        names = plan.agent_commands
        self.hosts = [Host(name, index, slots.get(name, plan.per_host)) for index, name in enumerate(names)]
        self.number = -1
        self.places: list[tuple[Host, int]] = []
        self.cause: Failure | None = None
        self.fits: dict[int, bool] = {}
        self.rejoin_at: float | None = None
        self.exit_code = 1

    def free(self) -> list[tuple[Host, int]]:
        """Host and number of each slot that may have a rank."""
        there = [host for host in self.hosts if host.is_there]
        return [(host, slot) for host in there for slot in range(host.slots) if slot not in host.resting | host.out]

    def best(self) -> int | None:
        """With how many ranks the run may go on."""
        most = min(self.bounds.most, len(self.free()))
        return next((n for n in range(most, self.bounds.least - 1, -1) if self.fits.get(n, True)), None)

    def begin(self, ranks: int) -> dict[int, list[int]]:
        """The next attempt, on so many ranks. Returns its slots by the index of their host."""
        self.number, self.places = self.number + 1, self.free()[:ranks]
        by_host: dict[int, list[int]] = {}
        for host, slot in self.places:
            by_host.setdefault(host.index, []).append(slot)
        return by_host

    def after_failure(self, cause: Failure, known: Sequence[Failure]) -> float | None:
        """Take the slots of `known`, of which `cause` is the first, out of use. Returns the grace of the other ranks:
        a short one where enough are left to go on after one that was killed, for they have nothing to save or to say.
        """
        self.cause = cause
        left = len(self.free()) - len(known)
        goes_on = cause.report is None and cause.exit_code > 128 and self.retries != 0 and left >= self.bounds.least
        if cause.exit_code != SAVED_EXIT and (cause.report is None or not cause.report.is_users):
            for failure in known:
                killed = failure.report is None and failure.exit_code > 128
                is_own = failure is cause or (killed and not failure.doubt)
                if is_own and 0 <= failure.rank < len(self.places):
                    host, slot = self.places[failure.rank]
                    if host.is_there:
                        (host.resting if killed or failure.doubt else host.out).add(slot)
        return SHORT_GRACE if goes_on else None

    def go_on(self, exit_code: int, again: bool) -> bool:
        """No rank is left: whether another attempt follows."""
        ranks, report = len(self.places), self.cause.report if self.cause is not None else None
        self.cause = None
        refused = report is not None and report.kind == "layout" and not self.fits.get(ranks)
        if refused and (self.number or ranks < self.bounds.most):
            self.fits[ranks] = False
        else:
            saved = exit_code == SAVED_EXIT
            if not again or (self.retries == 0 and not saved):
                return False
            self.fits[ranks] = True
            if not saved:
                self.retries = None if self.retries is None else self.retries - 1
                self.rejoin_at = time.monotonic() + self.bounds.rejoin
        self.exit_code = exit_code
        if (next_ranks := self.best()) is not None:
            left = "" if self.retries is None else f"; --retries: {self.retries} left"
            text = f"{ranks} ranks do not fit" if refused else f"exit code {exit_code}"
            say(f"launch: {text}: going on with {next_ranks} ranks (--elastic{left})")
        return True

    def too_few(self) -> str:
        """In words why there is no attempt."""
        absent = [host.name for host in self.hosts if not host.is_there]
        silent = f"; nothing is heard from {', '.join(absent)}" if absent else ""
        least = self.bounds.least
        return f"there is room for {len(self.free())} ranks, and --elastic asks for at least {least}{silent}"
