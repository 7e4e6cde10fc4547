"""Decides whether a failed run is started again, and where: `--retries N`, `--spare-hosts`, `--elastic MIN:MAX`.

Each attempt is a start like the first, with a new port, and the program resumes from its own last checkpoint.

    what has failed                        what follows with --retries
    a host: it is lost, does not start, or what was  a spare host takes its place. Without one the run ends: the
    printed fits a pattern of `faults.HOST`          same host would fail again
    the program: exit code 2, or a pattern of        the run ends: the same would fail again
    `faults.PROGRAM`
    something that passes by itself, by a pattern    another attempt on the same hosts
    of `faults.PASSES`
    something else                                   the same, and launch says that it may fail in the same way

With `--elastic` an attempt leaves out what has failed. A place is where one rank runs: a host, and a number on it that
stands for one device.

    a rank that failed      its place is left out
    a host that was lost    all of its places are left out, and spare hosts are used instead
    a number of ranks that  the next lower number is tried, and the refused one never again. CMD refuses a number by a
    CMD refuses             `LayoutError` before its ranks meet, because only CMD knows which numbers its layout takes

If fewer than MIN ranks can run, the run ends.
"""

from collections.abc import Mapping

from mmm_launch.channel.failures import Failure, say
from mmm_launch.channel.link import CLOSED
from mmm_launch.contract import SAVED_EXIT
from mmm_launch.machines.find import EVERYWHERE
from mmm_launch.machines.machine import read
from mmm_launch.run.control import Run
from mmm_launch.run.faults import HOST, PASSES, PROGRAM, Finding, look
from mmm_launch.spec.launch_spec import LaunchSpec
from mmm_launch.spec.options import Elastic

# A row of the table at the end: attempt, exit code, host, what followed, why.
ROW = "launch: {:<8} {:<10} {:<12} {:<28} {:.160}"


class Attempts:
    """The attempts of one `launch`.

    Attributes:
        number: number of the attempt under way, from 0.
        left: number of further attempts that may follow; None: any number.
        retries: number that --retries asks for. Only then a table at the end shows the attempts.
        elastic: what --elastic asks for; None where every attempt has the same ranks.
        bounds: the same, where every attempt has the same ranks as well.
        ranks: number of ranks of the attempt under way.
        places: host and number on it of each place that was not left out. The first `ranks` of them are in use.
        refused: numbers of ranks that CMD has refused.
        faults: the patterns of the machine, as in `Machine.faults`.
        rows: the table of the attempts that have ended.
    """

    def __init__(self, plan: LaunchSpec, retries: int | None) -> None:
        self.number = 0
        self.elastic = plan.elastic
        self.left = retries
        self.retries = retries
        self.faults = read(EVERYWHERE).faults | plan.machine.value.faults
        if retries is None and self.elastic is None:
            self.left = 0
            # Nothing follows a failure, so nothing has to be known of it.
            self.faults = {}
        self.ranks = plan.ranks
        self.bounds = self.elastic or Elastic(self.ranks, self.ranks)
        # A spare host takes as many ranks as the fullest host.
        counts = [*plan.counts.value, *[max(plan.counts.value)] * len(plan.spare)]
        self.places: list[tuple[str, int]] = []
        for host, count in zip((*plan.hosts.value, *plan.spare), counts, strict=True):
            self.places += [(host, slot) for slot in range(count)]
        self.refused: set[int] = set()
        self.rows = [ROW.format("attempt", "exit code", "host", "then", "why")]

    def on(self) -> list[str]:
        """Return the host of rank 0, 1, … of the attempt under way."""
        return [host for host, _ in self.places[: self.ranks]]

    def host_of(self, failure: Failure | None) -> str:
        """Return the host of a rank that has failed; "" if it is not known."""
        if failure is None:
            return ""
        return dict(enumerate(self.on())).get(failure.rank, "")

    def in_use(self) -> dict[str, list[int]]:
        """Return the places of the attempt under way: host → numbers on it."""
        by_host: dict[str, list[int]] = {}
        for host, slot in self.places[: self.ranks]:
            by_host.setdefault(host, []).append(slot)
        return by_host

    def starts_again(self, run: Run, exit_code: int) -> bool:
        """Decide what follows an attempt that has ended. Returns False if no other attempt follows."""
        host = self.host_of(run.cause)
        findings = self.findings(run)
        blamed = self.leave_out(run, findings)
        then = self.next_attempt(run, exit_code, findings, blamed)
        reasons = [*blamed.values(), *[finding.text for finding in findings], run.reason]
        where = ", ".join(blamed) or host
        self.rows.append(ROW.format(self.number, exit_code, where, then, reasons[0]).rstrip())
        self.number += 1
        # A user's mistake in the first attempt needs no table.
        if self.retries and not then and (self.number > 1 or run.again):
            say("\n".join(self.rows))
        return bool(then)

    def next_attempt(self, run: Run, exit_code: int, findings: list[Finding], blamed: Mapping[str, str]) -> str:
        """Choose the ranks of the next attempt among the places that are left, and say it.

        Args:
            findings: what was printed that patterns fit.
            blamed: host that was left out → why.

        Returns:
            What follows, in words; "": no other attempt.
        """
        kinds = {finding.whose for finding in findings}
        reason = f"exit code {exit_code}"
        # CMD refuses this number of ranks. In the first attempt that is the user's mistake, and ends the run.
        if self.elastic is not None and self.number > 0 and run.cause is not None and run.cause.is_layout:
            self.refused.add(self.ranks)
            reason = f"world size {self.ranks} does not fit"
        elif not run.again or self.left == 0:
            return ""
        elif PROGRAM in kinds and not blamed:
            say(f"launch: not started again, because the same would fail again: {findings[0].text}")
            return ""
        elif self.left is not None:
            self.left -= 1
        without = ""
        if blamed:
            without = f" without {', '.join(blamed)}"
        best = self.best_number()
        if best is None:
            room = f"there is room for world size {len(self.places)}{without}"
            say(f"launch: {room}, and at least {self.bounds.least} is needed: no other attempt without spare hosts")
            return ""
        self.ranks = best
        left = ""
        if self.left is not None:
            left = f" (--retries; {self.left} left)"
        then = f"starting again{without}"
        remark = ""
        if self.elastic is not None:
            then = f"continuing with world size {best} (--elastic)"
        elif not (blamed or PASSES in kinds or exit_code == SAVED_EXIT):
            remark = "; no host is known to be to blame, so it may fail in the same way"
        say(f"launch: {reason}: {then}{left}{remark}")
        return then

    def findings(self, run: Run) -> list[Finding]:
        """Return what is known of the failure that patterns fit: what ranks reported, and what was printed last."""
        findings = []
        for failure in run.own_failures:
            findings += look(self.faults, failure.text, self.on(), self.host_of(failure))
        if run.output is not None:
            printed = run.output.tail.decode(errors="replace")
            for finding in look(self.faults, printed, self.on(), self.host_of(run.cause)):
                # A rank that reports why it ends had survived what was printed before.
                if finding.whose == HOST or run.cause is None or run.cause.report is None:
                    findings.append(finding)
        return findings

    def leave_out(self, run: Run, findings: list[Finding]) -> dict[str, str]:
        """Remove the places that have failed: those of hosts that are to blame, and in an elastic run those of ranks.

        Returns:
            The hosts that are to blame, and why.
        """
        blamed = dict.fromkeys(run.transport.silent_hosts, "nothing was heard from it")
        if set(blamed) >= set(self.on()):
            # No host has started anything, so no host in particular is to blame.
            blamed = {}
        for finding in findings:
            if finding.whose == HOST and finding.host and self.elastic is None:
                blamed[finding.host] = finding.text
        ranks = set()
        for failure in run.failures:
            is_cause = failure is run.cause
            was_killed = failure in run.own_failures and failure.is_killed and not failure.doubt
            if failure.lost:
                # An MPI kills its other processes when one is gone, which closes their connections. So a closed
                # connection says something about its host only where it was the first failure.
                if is_cause or failure.lost != CLOSED:
                    blamed[self.host_of(failure)] = failure.text
            # The cause, and what the system has killed on its own. Other failures are consequences. A rank that has
            # saved its state, or refuses the number of ranks, has a device that is fine.
            elif (is_cause or was_killed) and failure.exit_code != SAVED_EXIT and not failure.is_layout:
                ranks.add(failure.rank)
        if self.elastic is None:
            ranks = set()
        places = enumerate(self.places)
        self.places = [place for rank, place in places if rank not in ranks and place[0] not in blamed]
        return blamed

    def best_number(self) -> int | None:
        """Return the largest number of ranks that the run may continue with. None: there is none."""
        most = min(self.bounds.most, len(self.places))
        for n_ranks in range(most, self.bounds.least - 1, -1):
            if n_ranks not in self.refused:
                return n_ranks
        return None
