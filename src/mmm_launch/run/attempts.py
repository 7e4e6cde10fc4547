"""Decides whether a failed run is started again, and with which ranks: `--retries N`, `--elastic MIN:MAX`.

Each attempt is a start like the first, and the program resumes from its last checkpoint. With `--elastic` an attempt
leaves out what has failed. A place is where one rank runs: a host, and a number on it that stands for one device.

    a rank that failed      its place is left out
    a host that was lost    all of its places are left out, and `--spare-hosts` are used instead
    a number of ranks that  the next lower number is tried, and the refused one never again. CMD refuses a number by a
    CMD refuses             `LayoutError` before its ranks meet, because only CMD knows which numbers its layout takes

If fewer than MIN ranks can run, the run ends.
"""

from mmm_launch.channel.failures import say
from mmm_launch.channel.link import CLOSED
from mmm_launch.contract import SAVED_EXIT
from mmm_launch.run.control import Run
from mmm_launch.spec.launch_spec import LaunchSpec
from mmm_launch.spec.options import Elastic


class Attempts:
    """The attempts of one `launch`.

    Attributes:
        number: number of the attempt under way, from 0.
        left: number of further attempts that may follow; None: any number.
        elastic: what --elastic asks for; None where every attempt has the same ranks.
        ranks: number of ranks of the attempt under way.
        places: host and number on it of each place that was not left out. The first `ranks` of them are in use.
        refused: numbers of ranks that CMD has refused.
    """

    def __init__(self, plan: LaunchSpec, retries: int | None) -> None:
        self.number = 0
        self.elastic = plan.elastic
        self.left = retries
        if retries is None and self.elastic is None:
            self.left = 0
        self.ranks = plan.ranks
        # A spare host takes as many ranks as the fullest host.
        counts = [*plan.counts.value, *[max(plan.counts.value)] * len(plan.spare)]
        self.places: list[tuple[str, int]] = []
        for host, count in zip((*plan.hosts.value, *plan.spare), counts, strict=True):
            self.places += [(host, slot) for slot in range(count)]
        self.refused: set[int] = set()

    def in_use(self) -> dict[str, list[int]]:
        """Return the places of the attempt under way: host → numbers on it."""
        by_host: dict[str, list[int]] = {}
        for host, slot in self.places[: self.ranks]:
            by_host.setdefault(host, []).append(slot)
        return by_host

    def starts_again(self, run: Run, exit_code: int) -> bool:
        """Decide what follows a failed attempt. Returns False if no other attempt follows."""
        # CMD refuses this number of ranks. In the first attempt that is the user's mistake, and ends the run.
        if self.elastic is not None and self.number > 0 and run.cause is not None and run.cause.is_layout:
            self.refused.add(self.ranks)
            reason = f"world size {self.ranks} does not fit"
        else:
            if not run.again or self.left == 0:
                return False
            if self.left is not None:
                self.left -= 1
            reason = f"exit code {exit_code}"
            if self.elastic is not None:
                self.leave_out(run)
        self.number += 1
        left = ""
        if self.left is not None:
            left = f" (--retries; {self.left} left)"
        if self.elastic is None:
            say(f"launch: {reason}: starting again{left}")
            return True
        best = self.best_number(self.elastic)
        if best is None:
            least = self.elastic.least
            say(f"launch: there is room for world size {len(self.places)}, and --elastic asks for at least {least}")
            return False
        self.ranks = best
        say(f"launch: {reason}: continuing with world size {best} (--elastic){left}")
        return True

    def leave_out(self, run: Run) -> None:
        """Remove the places of the ranks and hosts that have failed."""
        used = self.places[: self.ranks]
        hosts = set(run.transport.silent_hosts)
        if hosts >= {host for host, _ in used}:
            # No host has started anything, so no host in particular is to blame.
            hosts = set()
        places = set()
        for failure in run.failures:
            # A rank that has saved its state has done what it was told: its device is fine.
            if failure.exit_code == SAVED_EXIT or not 0 <= failure.rank < len(used):
                continue
            place = used[failure.rank]
            is_cause = failure is run.cause
            was_killed = failure in run.own_failures and failure.is_killed and not failure.doubt
            if failure.lost:
                # An MPI kills its other processes when one is gone, which closes their connections. So a closed
                # connection says something about its host only where it was the first failure.
                if is_cause or failure.lost != CLOSED:
                    hosts.add(place[0])
            # The cause, and what the system has killed on its own. Other failures are consequences.
            elif is_cause or was_killed:
                places.add(place)
        self.places = [place for place in self.places if place not in places and place[0] not in hosts]

    def best_number(self, elastic: Elastic) -> int | None:
        """Return the largest number of ranks that the run may continue with. None: there is none."""
        most = min(elastic.most, len(self.places))
        for n_ranks in range(most, elastic.least - 1, -1):
            if n_ranks not in self.refused:
                return n_ranks
        return None
