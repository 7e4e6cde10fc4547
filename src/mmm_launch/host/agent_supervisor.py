"""An agent's part of a run: it supervises its ranks as launch does on one host, and launch decides."""

import contextlib
import os
import selectors
import signal
import socket
import time
from pathlib import Path

from mmm_launch.channel import commands
from mmm_launch.channel import link as links
from mmm_launch.channel.failures import Failure, say
from mmm_launch.channel.link import Link, Lost
from mmm_launch.channel.wire import PASSED_ON
from mmm_launch.host.stage import Copy
from mmm_launch.run.control import Run
from mmm_launch.run.local import LocalRanks

# Processes by which an MPI holds a host's ranks. One whose mpiexec was cut off would wait for it for good.
HELPERS = ("hydra_pmi_proxy", "orted", "prted")


class AgentSupervisor(Run):
    """Supervises the ranks that this process stands for.

    Attributes:
        ranks: its transport. link: to launch; None once that is gone. copy: the environment that they run from.
        launcher: what has started this process.
    """

    def __init__(self, ranks: LocalRanks, link: Link, launcher: str, copy: Copy | None) -> None:
        super().__init__(ranks, len(ranks.plan.ranks))
        self.ranks, self.launcher, self.copy = ranks, launcher, copy
        self.link: Link | None = link
        self.selector.register(link, selectors.EVENT_READ)

    def wait(self) -> set[int]:
        """Take in what launch commands, too."""
        while self.link is not None and self.link.early:
            self.on_command(self.link.early.pop(0))
        ready = super().wait()
        if self.link is not None and self.link.fileno() in ready:
            try:
                for message in self.link.read():
                    self.on_command(message)
            except Lost as lost:
                self.launch_is_gone(str(lost))
        return ready

    def on_command(self, message: links.Message) -> None:
        if "kill" in message:
            self.ends(0, again=False)
            self.kill()
        elif "end" in message:
            self.ends(0, again=False)
            self.grace = message["grace"]
            is_ignored = message["end"] in self.signals.ignored  # on this host, by who started its processes
            self.end(signal.SIGTERM if is_ignored else message["end"], message["reason"])
        elif "where" in message:
            self.tell({"stacks": self.ranks.stacks()})
        elif "signal" in message:
            self.transport.forward(message["signal"])

    def will_save(self) -> None:
        if not self.saves:
            self.tell({"saves": True})
        super().will_save()

    def failed(self, failure: Failure) -> None:
        super().failed(failure)
        self.tell({"failure": commands.write_failure(failure, time.monotonic())})

    def rank_ended(self, rank: int) -> None:
        super().rank_ended(rank)
        self.tell({"ended": rank})

    def decide(self) -> None:
        """launch decides."""

    def name_cause(self) -> Failure:
        """launch does: so this process's exit code is 0."""
        self.ends(0, again=False)
        return self.failures[0]

    def tell(self, message: links.Message) -> None:
        if self.link is not None:
            try:
                self.link.send(message)
            except Lost as lost:
                self.launch_is_gone(str(lost))

    def launch_is_gone(self, reason: str) -> None:
        assert self.link is not None
        self.selector.unregister(self.link)
        self.link.close()
        self.link = None
        why = f"{self.ranks.host} has lost launch ({reason})"
        say(f"launch: {why}: ending {self.left()}")
        if self.exit_code is None:
            self.ends(1, again=False)
            self.end(signal.SIGTERM, why)

    def on_signal(self, number: int) -> None:
        if number in PASSED_ON and self.launcher == "srun":
            return  # Slurm signals every process, the ranks too
        super().on_signal(number)

    def interrupted(self, number: int) -> None:
        """mpiexec, srun or the scheduler ends this process: so it does the ranks."""
        if self.exit_code is None:
            self.ends(0, again=False)
            self.tell({"interrupted": number})
            self.grace = self.grace_to_save()
            self.end(number)

    def ranks_are_gone(self) -> None:
        """Say so."""
        super().ranks_are_gone()
        self.tell({"bye": True})
        if self.copy is not None:
            self.copy.remove()
        if self.link is None:
            end_helper()
            # At a 1 an MPI kills the other hosts' agents, which may still remove their copies.
            self.exit_code = 1 if self.copy is None else 0


def host_name() -> str:
    """This host's name, as the scheduler has it where it says so."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def end_helper() -> None:
    """launch is gone, and so are the ranks: end the MPI's own process on this host, which may never notice."""
    with contextlib.suppress(OSError):
        if (Path("/proc") / str(os.getppid()) / "comm").read_text().strip() in HELPERS:
            os.kill(os.getppid(), signal.SIGTERM)
