"""Whether a run that has failed is started again, and with which ranks: `--retries N`, `--elastic MIN:MAX`.

Each attempt is a start like the first, and the program goes on from its last checkpoint. With `--elastic` what has
failed is left out. A place is where one rank runs: a host, and a number on it, which stands for one of its devices.

    a rank that failed      its place is left out
    a host that was lost    all of its places are left out; `--spare-hosts` come next
    a number of ranks that  the next lower number is tried, and that one never again. The program itself says which
    CMD refuses             numbers its layout takes, by a `LayoutError` before its ranks meet

With fewer than MIN ranks the run ends.
"""

from mmm_launch.channel.failures import Failure, say
from mmm_launch.channel.link import CLOSED
from mmm_launch.contract import SAVED_EXIT
from mmm_launch.run.control import Run
from mmm_launch.spec.launch_spec import LaunchSpec


class Attempts:
    """The attempts of one `launch`.

    Attributes:
        number: number of the attempt under way, from 0.
        left: number of further attempts that may follow; None: any number.
        elastic: what --elastic asks for; None where every attempt has the same ranks.
        ranks: number of ranks of the attempt under way.
        places: host and number on it of each place that was not left out. The first `ranks` of them are in use.
        refused: numbers of ranks that CMD has refused.
        accepted: numbers of ranks that it has run with.
    """

    def __init__(self, plan: LaunchSpec, retries: int | None) -> None:
        self.number = 0
        self.elastic = plan.elastic
        self.left = retries
        if retries is None and self.elastic is None:
            self.left = 0
        self.ranks = plan.ranks
        self.places: list[tuple[str, int]] = []
        for host, count in zip(plan.hosts.value, plan.counts.value, strict=True):
            self.places += [(host, number) for number in range(count)]
        if self.elastic is not None:
            for host in self.elastic.spare:
                self.places += [(host, number) for number in range(plan.per_host)]
        self.refused: set[int] = set()
        self.accepted: set[int] = set()

    @property
    def may_follow(self) -> bool:
        """Whether another attempt follows if this one fails."""
        return self.left is None or self.left > 0

    def in_use(self) -> dict[str, list[int]]:
        """The places of the attempt under way: host → numbers."""
        by_host: dict[str, list[int]] = {}
        for host, number in self.places[: self.ranks]:
            by_host.setdefault(host, []).append(number)
        return by_host

    def go_on(self, run: Run, exit_code: int) -> bool:
        """Decide what follows an attempt that has failed. Returns False where nothing does."""
        if self.elastic is None:
            if not run.again or not self.may_follow:
                return False
            say(f"launch: exit code {exit_code}: starting again (--retries; {self.left} left)")
            self.count_down()
            self.number += 1
            return True
        if self.is_refused(run.cause):
            self.refused.add(self.ranks)
            reason = f"{self.ranks} ranks do not fit"
        else:
            if not run.again or not self.may_follow:
                return False
            self.accepted.add(self.ranks)
            self.count_down()
            self.leave_out(run)
            reason = f"exit code {exit_code}"
        best = self.best_number()
        if best is None:
            least = self.elastic.least
            say(f"launch: there is room for {len(self.places)} ranks, and --elastic asks for at least {least}")
            return False
        self.ranks = best
        self.number += 1
        left = ""
        if self.left is not None:
            left = f"; --retries: {self.left} left"
        say(f"launch: {reason}: going on with {best} ranks (--elastic{left})")
        return True

    def count_down(self) -> None:
        if self.left is not None:
            self.left -= 1

    def is_refused(self, cause: Failure | None) -> bool:
        """Whether CMD's layout does not take this number of ranks. The first number is the user's own mistake."""
        if cause is None or cause.report is None or cause.report.kind != "layout":
            return False
        return self.number > 0 and self.ranks not in self.accepted

    def leave_out(self, run: Run) -> None:
        """Take the places of what has failed out of use."""
        used = self.places[: self.ranks]
        hosts = set(run.transport.silent_hosts)
        if hosts >= {host for host, _ in used}:
            hosts = set()  # nothing has started: no host is to blame
        places = set()
        for failure in run.failures:
            if failure.exit_code == SAVED_EXIT or not 0 <= failure.rank < len(used):
                continue
            place = used[failure.rank]
            is_cause = failure is run.cause
            if failure.lost:
                # An MPI kills its other processes when one is gone: their connections are closed.
                if is_cause or failure.lost != CLOSED:
                    hosts.add(place[0])
            elif is_cause or (failure in run.own_failures and failure.is_killed and not failure.doubt):
                places.add(place)
        self.places = [place for place in self.places if place not in places and place[0] not in hosts]

    def best_number(self) -> int | None:
        """The largest number of ranks that the run may go on with."""
        assert self.elastic is not None
        most = min(self.elastic.most, len(self.places))
        for number in range(most, self.elastic.least - 1, -1):
            if number not in self.refused:
                return number
        return None
