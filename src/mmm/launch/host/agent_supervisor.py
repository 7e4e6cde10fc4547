"""An agent's part of one attempt: it supervises its ranks as launch does on one host, and launch decides."""

import contextlib
import os
import selectors
import signal
import socket
import time
from pathlib import Path

from mmm.contract import ENDING
from mmm.launch.channel import commands
from mmm.launch.channel import link as links
from mmm.launch.channel.failures import say
from mmm.launch.channel.link import Link, Lost
from mmm.launch.channel.wire import PASSED_ON, Status
from mmm.launch.plan import hosts
from mmm.launch.plan.host_plan import HostPlan
from mmm.launch.run.server import ForkServerProcess
from mmm.launch.run.supervisor import Supervisor
from mmm.launch.staging.host import Stager

# Processes by which an MPI holds a host's ranks. One whose mpiexec was cut off would wait for it for good.
HELPERS = ("hydra_pmi_proxy", "orted", "prted")


class AgentSupervisor(Supervisor):
    """Supervises the ranks that this process stands for.

    Attributes:
        told: failures that launch knows of. lost: launch is gone.
    """

    ignore_sigterm = True

    def __init__(
        self,
        plan: HostPlan,
        link: Link,
        launcher: str,
        inherit: tuple[int, ...] = (),
        stager: Stager | None = None,
        server: ForkServerProcess | None = None,
        persistent: bool = False,
    ) -> None:
        super().__init__(plan, server=server, persistent=persistent)
        self.stager, self.launcher, self.inherit = stager, launcher, inherit
        self.link: Link | None = link
        self.told = 0
        self.lost = False
        self.host = host_name()

    def start(self) -> None:
        super().start()
        assert self.link is not None
        self.selector.register(self.link, selectors.EVENT_READ)
        while self.link.early:
            self.on_command(self.link.early.pop(0))

    def wait(self) -> set[int]:
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
            self.exit_code = 0
            self.kill()
        elif message.get("signal") in ENDING:
            self.exit_code = 0
            self.grace = message["grace"]
            ignored = message["signal"] in self.ignored  # on this host, by who started its processes
            self.end(signal.SIGTERM if ignored else message["signal"], message["termination_reason"])
        elif "where" in message:
            self.tell({"stacks": self.stacks()})
        elif "signal" in message:
            self.forward_signal(message["signal"])

    def on_saves(self) -> None:
        if not self.saves:
            self.tell({"saves": True})
        super().on_saves()

    def on_status(self, status: Status) -> None:
        super().on_status(status)
        if status.code is not None:
            self.tell_failures()
            self.tell({"ended": status.rank})

    def decide(self, now: float) -> None:
        """launch decides; here nothing is done but to tell it, and to kill after the grace."""
        self.tell_failures()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill()

    def tell_failures(self) -> None:
        for failure in self.failures[self.told :]:
            self.tell({"failure": commands.write_failure(failure, time.monotonic())})
        self.told = len(self.failures)

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
        self.link, self.lost = None, True
        why = f"{self.host} has lost launch ({reason})"
        say(f"launch: {why}: ending {self.left()}")
        if self.exit_code is None:
            self.exit_code = 1
            self.end(signal.SIGTERM, why)

    def fail(self) -> None:
        self.tell_failures()

    def on_signal(self, number: int) -> None:
        if number in PASSED_ON and self.launcher == "srun":
            return  # Slurm signals every process, the ranks too
        super().on_signal(number)

    def interrupted(self, number: int) -> None:
        """mpiexec, srun or the scheduler ends this process: so it does the ranks."""
        if self.exit_code is None:
            self.exit_code = 0
            self.tell({"interrupted": number})
            self.grace = self.grace_to_save()
            self.end(number)

    def finish(self) -> int:
        code = super().finish()
        self.tell_failures()
        self.tell({"bye": True, "port": hosts.free_port("")})  # for the next attempt
        if self.stager is not None:
            self.stager.wait_and_remove(self.link)
        if self.lost:
            end_helper()
            return 1
        return 0 if self.exit_code is not None or self.failures else code


def host_name() -> str:
    """This host's name, as the scheduler has it where it says so."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def end_helper() -> None:
    """launch is gone, and so are the ranks: end the MPI's own process on this host, which may never notice."""
    with contextlib.suppress(OSError):
        if (Path("/proc") / str(os.getppid()) / "comm").read_text().strip() in HELPERS:
            os.kill(os.getppid(), signal.SIGTERM)
