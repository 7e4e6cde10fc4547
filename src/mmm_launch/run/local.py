"""Ranks on this host only: launch starts their fork server itself, without mpiexec or srun."""

import selectors

from mmm_launch.channel import failures
from mmm_launch.channel.link import Lost, Message
from mmm_launch.run.control import Run, Transport
from mmm_launch.run.output import Output
from mmm_launch.run.server import LEFTOVER_GRACE, ForkServer
from mmm_launch.spec.host_spec import HostSpec


class LocalRanks(Transport):
    """Starts the fork server, and listens to it until it has ended.

    Attributes:
        run: the run that this transport serves.
        spec: what is started.
        server: the fork server.
        is_gone: whether the fork server has ended.
    """

    run: Run
    server: ForkServer

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.is_gone = False

    def start(self, run: Run) -> None:
        self.run = run
        # Ranks print to launch's own stdout, unless launch has to know when something was printed.
        if run.timeout is not None:
            run.output = Output(run.selector)
        self.server = ForkServer(self.spec, run.signals.ignored, run.output)
        if run.output is not None:
            run.output.started()
        run.selector.register(self.server.link, selectors.EVENT_READ)

    def take_in(self, ready: set[int]) -> None:
        if self.is_gone or self.server.link.fileno() not in ready:
            return
        try:
            for message in self.server.link.read():
                self.run.on_message(message, "")
        except Lost:
            self.is_gone = True
            self.run.selector.unregister(self.server.link)

    def is_over(self) -> bool:
        return self.is_gone

    def send(self, message: Message) -> None:
        self.server.send(message)

    def end(self, message: Message) -> None:
        if self.run.has_ranks:
            self.server.send(message)
        else:
            # The fork server is still importing, and would not read the message. It has no ranks to lose.
            self.run.kill()

    def kill(self) -> None:
        self.server.kill()

    def finish(self) -> tuple[str, int]:
        # After a failure the ranks had their time. Only after a good run what they left behind gets a moment.
        grace = 0.0
        if self.run.exit_code is None and not self.run.failures:
            grace = LEFTOVER_GRACE
        code = self.server.finish(grace)
        if self.run.output is not None:
            self.run.output.drain()
        reason, code = failures.end_of_process(code)
        return f"the process that holds the ranks (pid {self.server.process.pid}) {reason}; the ranks were killed", code

    def clean_up(self) -> None:
        if hasattr(self, "server"):
            self.server.close()
