"""Ranks on many hosts. mpiexec or srun starts one agent (`mmm_launch.host.agent`) on each, which connects to launch.

When all agents have connected, launch tells each of them what to run. Over these connections launch learns how each
rank ends, and sends its commands. So it does not depend on an MPI to pass signals on or to kill survivors.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from mmm_launch.channel import failures
from mmm_launch.channel.failures import Failure, say, signal_name
from mmm_launch.channel.link import Lost, Message, SignedLink
from mmm_launch.channel.reception import Reception
from mmm_launch.contract import open_files
from mmm_launch.errors import LaunchError
from mmm_launch.run import processes
from mmm_launch.run.control import Run, Transport
from mmm_launch.run.output import Output
from mmm_launch.spec import hosts, mpi, slurm
from mmm_launch.spec.launch_spec import LaunchSpec

# launch's own address, for networks on which it cannot find the right one.
ADDRESS_VARIABLE = "MMM_LAUNCH_ADDRESS"
# Seconds until every agent has connected.
START_TIMEOUT = 300.0
# Seconds that agents have, after {"kill": true}, to say that their ranks are gone.
LAST_WORDS = 3.0
# Seconds that mpiexec or srun has to end once its agents have ended.
LAUNCHER_END = 1.5
# The same, in seconds, after a run that went well: other processes of mpiexec may still write.
LAUNCHER_LINGERS = 20.0
# Seconds that hosts have to remove their copies of --stage.
REMOVAL = 60.0
SPARE_FILES = 64


@dataclass
class Host:
    """One host of the run, once its agent has connected.

    Attributes:
        link: connection to its agent.
        name: the host's own name.
        place: the number that mpiexec or srun has given the agent; −1: it cannot start ranks.
        port: a port that is free on the host.
        ranks: numbers of the ranks on the host, once it was told what to run.
        has_ranks: whether its ranks have been started.
        is_done: whether the agent has said that all of its ranks have ended.
    """

    link: SignedLink
    name: str
    place: int
    port: int
    ranks: list[int] = field(default_factory=list)
    has_ranks: bool = False
    is_done: bool = False


class Backend(Transport):
    """Starts mpiexec or srun, and exchanges messages with its agents.

    Attributes:
        run: the run that this transport serves.
        spec: what is started.
        start_timeout: seconds in which all agents have to connect.
        token: secret by which agents prove that they are of this run.
        reception: accepts connections and checks the proof.
        connected: hosts with a living connection, by its file descriptor.
        hosts_by_place: hosts that can start ranks, by the number of their agent.
        heard: names of these hosts, as `hosts.host_key` has them. Lost hosts stay in it.
        has_begun: whether the agents have been told what to run.
        pending: messages for ranks that have not started yet.
        launcher: the process of mpiexec or srun.
        launcher_ended: whether that process has ended.
    """

    run: Run
    launcher: subprocess.Popen
    reception: Reception

    def __init__(self, spec: LaunchSpec, start_timeout: float = START_TIMEOUT) -> None:
        self.spec = spec
        self.start_timeout = start_timeout
        self.token = secrets.token_hex(16)
        self.connected: dict[int, Host] = {}
        self.hosts_by_place: dict[int, Host] = {}
        self.heard: set[str] = set()
        self.has_begun = False
        self.launcher_ended = False
        self.pending: list[Message] = []

    # The start.

    def start(self, run: Run) -> None:
        self.run = run
        spec = self.spec
        # −1: there is no limit.
        limit = open_files()
        if 0 <= limit < spec.processes + SPARE_FILES:
            raise LaunchError(
                f"{spec.processes} hosts each hold a connection to launch, which may open only {limit} files: raise "
                "the limit (ulimit -Hn), or use fewer hosts (-N)."
            )
        addresses = own_addresses(spec)
        # "" listens on all networks. If all hosts are this one, nobody outside of it has to reach the port.
        listen_at = ""
        if all(address.startswith("127.") for address in addresses):
            listen_at = addresses[0]
        server = socket.create_server((listen_at, 0), backlog=min(spec.processes + 8, 4096))
        self.reception = Reception(server, self.token, run.selector)
        port = server.getsockname()[1]
        # What the agents find in their environment. Other users of a host cannot read it there, as they could read a
        # command line.
        entry: dict[str, Any] = {
            "at": [[address, port] for address in addresses],
            "token": self.token,
            "launcher": spec.launcher.value,
            "port": int(spec.shared["MASTER_PORT"].value),
        }
        if spec.stage is not None:
            entry["stage"] = asdict(spec.stage)
        environ = {name: value for name, value in os.environ.items() if name not in slurm.OF_A_TASK}
        run.output = Output(run.selector)
        run.clocks.set(self.too_late, time.monotonic() + self.start_timeout)
        try:
            self.launcher = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=run.output.stdout,
                stderr=run.output.stderr,
                # The terminal's Ctrl-C goes to launch only: mpiexec would kill all ranks before they can save.
                start_new_session=True,
                env={**environ, **spec.environ, mpi.AGENT_VARIABLE: json.dumps(entry)},
            )
        except OSError as error:
            raise LaunchError(
                f"{spec.command[0]}, which is to start the ranks ({spec.launcher.source}), cannot be run: "
                f"{error.strerror}.\n  Load the site's module for it, or run on this host only: --scheduler none"
            ) from None
        run.output.started()

    def expected(self) -> int:
        """Return how many agents have not connected yet."""
        return self.spec.processes - len(self.hosts_by_place)

    def too_late(self) -> None:
        """End a run whose agents have not all connected in time."""
        if not self.has_begun and self.run.exit_code is None:
            text = self.missing()
            self.run.give_up(f"after {self.start_timeout:g} s {text}", 1)

    def missing(self) -> str:
        """Say in words which hosts have not connected, and note them for `Attempts`."""
        self.silent_hosts = tuple(name for name in self.spec.hosts.value if hosts.host_key(name) not in self.heard)
        others = [name for name in self.silent_hosts if not hosts.is_here(name)]
        silent = ""
        if others:
            silent = f"; nothing was heard from {', '.join(others[:8])}"
        if len(others) > 8:
            silent += " …"
        return (
            f"{self.expected()} of {self.spec.processes} processes that {self.spec.launcher.value} was to start have "
            f"not connected to launch{silent}"
        )

    # What is heard.

    def take_in(self, ready: set[int]) -> None:
        for descriptor in ready & self.connected.keys():
            host = self.connected[descriptor]
            try:
                for message in host.link.read():
                    self.hear(host, message)
            except Lost as lost:
                self.lose(host, str(lost))
        self.welcome(ready)
        if self.launcher_ended:
            return
        # mpiexec is gone, but last messages of the hosts may still be on their way: wait a moment for them.
        if self.launcher.poll() is not None:
            self.launcher_ended = True
            self.run.clocks.set(self.launcher_is_gone, time.monotonic() + LAUNCHER_END)

    def welcome(self, ready: set[int]) -> None:
        """Take in the agents that have proven that they are of this run."""
        refused = self.reception.refused
        for link, message in self.reception.welcome(ready, self.expected()):
            self.run.selector.register(link, selectors.EVENT_READ)
            hello = message["hello"]
            host = Host(link, hello["host"], hello["place"], hello["port"])
            self.connected[link.fileno()] = host
            self.join(host, hello["error"])
        if self.reception.refused and not refused:
            # Said once: there may be many such connections.
            say("launch: a connection without this run's token was refused")
        self.run.clocks.set(self.refuse_late, self.reception.deadline())

    def refuse_late(self) -> None:
        """Refuse a connection that has not proven itself in time."""
        self.welcome(set())

    def join(self, host: Host, error: str) -> None:
        """Note that a host's agent has connected. When the last one has, tell all of them what to run.

        Args:
            error: why the host cannot start ranks; "": it can.
        """
        wanted = self.spec.processes
        if not error and (host.place in self.hosts_by_place or not 0 <= host.place < wanted):
            error = (
                f"{self.spec.launcher.value} has started process {host.place} on {host.name}, and was asked for one on "
                f"each of {wanted} hosts: its options (--launcher-args) contradict launch's."
            )
        if error:
            host.place = -1
            self.run.failed(Failure.of_user(0, error))
        else:
            self.hosts_by_place[host.place] = host
            self.heard.add(hosts.host_key(host.name))
        if self.run.exit_code is not None:
            # This agent connected while the run was already ending. It waits for this message, also after an error.
            self.tell(host, {"kill": True})
        elif not error and not self.expected():
            self.run.clocks.clear(self.too_late)
            self.begin()

    def begin(self) -> None:
        """Tell each agent what to run: all have connected."""
        self.has_begun = True
        in_order = [self.hosts_by_place[place] for place in range(self.spec.processes)]
        variables = self.spec.variables
        if self.spec.shared["MASTER_PORT"].is_wish:
            # Rank 0 runs on the first host, which knows a port that is free there.
            variables["MASTER_PORT"] = str(in_order[0].port)
        # Ranks of one host follow each other: host 0 has ranks 0 … counts[0] − 1, host 1 the next.
        first = 0
        for host, place in zip(in_order, places_in_spec(self.spec, in_order), strict=True):
            command = self.spec.host_command(place, first, variables)
            host.ranks = list(range(first, first + command["count"]))
            first += command["count"]
            self.tell(host, {"go": command})

    def hear(self, host: Host, message: Message) -> None:
        """Act on one message of an agent. `mmm_launch.channel.link` lists them."""
        if "refused" in message:
            self.run.failed(Failure.of_user(host.ranks[0], message["refused"]))
        elif "interrupted" in message:
            signum = message["interrupted"]
            text = (
                f"{signal_name(signum)} came to the ranks on {host.name}, and not from launch: the scheduler, or "
                f"{self.spec.launcher.value}, ends the run"
            )
            self.run.failed(Failure(min(host.ranks, default=0), 128 + signum, 0.0, text=text, final=True))
        elif "gone" in message:
            host.is_done = True
            # The fork server has ended. Ranks whose end it has not told were killed with it.
            left = [rank for rank in host.ranks if rank not in self.run.ended]
            if left and self.run.exit_code is None and not self.run.failures:
                reason, code = failures.end_of_process(message["gone"])
                text = f"the process that holds the ranks on {host.name} {reason}; the ranks were killed"
                self.run.failed(Failure(left[0], code, time.monotonic(), text=text, host=host.name))
            self.run.ended.update(left)
        else:
            if "started" in message:
                host.has_ranks = True
                for waiting in self.pending:
                    self.tell(host, waiting)
            self.run.on_message(message, host.name)

    def lose(self, host: Host, reason: str) -> None:
        """Take note of a connection that is over.

        If the agent has not said before that its ranks are gone, then its host is down or cut off, or somebody has
        killed the agent.
        """
        self.run.selector.unregister(host.link)
        del self.connected[host.link.fileno()]
        host.link.close()
        if not self.has_begun and self.hosts_by_place.get(host.place) is host:
            # mpiexec or srun will say more about it, or the start times out.
            del self.hosts_by_place[host.place]
        elif self.has_begun and host.ranks and not host.is_done:
            left = [rank for rank in host.ranks if rank not in self.run.ended]
            noun = "ranks"
            if len(left) == 1:
                noun = "rank"
            which = ", ".join(map(str, left))
            text = f"lost {noun} {which} on {host.name}: the connection to launch broke ({reason})"
            failure = Failure(
                rank=min(left, default=host.ranks[0]),
                exit_code=1,
                time=time.monotonic(),
                text=text,
                host=host.name,
                lost=reason,
            )
            self.run.failed(failure)
            self.run.ended.update(left)
        # Once nobody is connected, mpiexec or srun should end as well. If it does not in time, it is stopped.
        if self.connected or (not self.has_begun and self.run.exit_code is None):
            return
        if self.run.exit_code is None:
            self.stop_launcher_in(LAUNCHER_LINGERS)
        elif self.spec.stage is not None and self.expected():
            # Other hosts still unpack. Their agents end by themselves once they connect.
            self.stop_launcher_in(REMOVAL)
        else:
            self.stop_launcher_in(LAUNCHER_END)

    # What is said.

    def tell(self, host: Host, message: Message) -> None:
        # `take_in` will notice it as well, and tell the run.
        with contextlib.suppress(Lost):
            host.link.send(message)

    def send(self, message: Message) -> None:
        for host in self.hosts_by_place.values():
            if host.has_ranks and not host.is_done:
                self.tell(host, message)
        # A host whose ranks start later gets the message then.
        if not all(host.has_ranks for host in self.hosts_by_place.values()) or not self.has_begun:
            self.pending.append(message)

    def end(self, message: Message) -> None:
        if not self.has_begun:
            self.kill()
            return
        for host in self.connected.values():
            # A fork server that is still importing would not read the message: it has no ranks to lose, so kill it.
            if host.has_ranks:
                self.tell(host, message)
            else:
                self.tell(host, {"kill": True})
        if not self.connected:
            self.stop_launcher_in(LAUNCHER_END)

    def kill(self) -> None:
        self.run.clocks.clear(self.run.kill)
        for host in self.connected.values():
            self.tell(host, {"kill": True})
        patience = 0.0
        if self.connected:
            patience = LAST_WORDS
        if self.connected and self.spec.stage is not None:
            patience = REMOVAL
        self.stop_launcher_in(patience)

    # The end.

    def is_over(self) -> bool:
        """Say whether mpiexec or srun has ended, and nobody is connected or awaited."""
        clocks = self.run.clocks
        awaited = clocks.is_set(self.launcher_is_gone) or clocks.is_set(self.run.kill)
        return self.launcher_ended and not (self.connected and awaited)

    def launcher_is_gone(self) -> None:
        """End a run whose mpiexec or srun has ended while agents are connected. They had time to say why."""
        if self.connected and self.run.exit_code is None:
            reason, code = failures.end_of_process(self.launcher.returncode)
            self.run.give_up(f"{self.spec.command[0]} {reason} while its ranks ran", code)

    def stop_launcher_in(self, seconds: float) -> None:
        self.run.clocks.set(self.stop_launcher, time.monotonic() + seconds)

    def stop_launcher(self) -> None:
        """End mpiexec or srun, and what it has started on this host."""
        grace = 0.5
        if self.spec.stage is not None and not self.has_begun:
            # A host that is still unpacking has not connected yet.
            grace = REMOVAL
        processes.end(self.launcher.pid, "-", grace)
        self.launcher.wait()

    def finish(self) -> tuple[str, int]:
        assert self.run.output is not None
        reason, code = failures.end_of_process(self.launcher.wait())
        self.run.output.drain()
        when = "while its ranks ran"
        if not self.has_begun:
            when = f"before the ranks could start: {self.missing()}"
        return f"{self.spec.command[0]} {reason} {when}", code

    def clean_up(self) -> None:
        if hasattr(self, "launcher") and self.launcher.returncode is None:
            self.stop_launcher()
        for host in self.connected.values():
            host.link.close()
        if hasattr(self, "reception"):
            self.reception.close()


def places_in_spec(spec: LaunchSpec, in_order: list[Host]) -> list[int]:
    """Return the index in the spec of each host: mpiexec or srun may have numbered the hosts in another order.

    If hosts call themselves by other names than the spec does, they are taken to be in the spec's order.
    """
    planned = {hosts.host_key(name): place for place, name in enumerate(spec.hosts.value)}
    names = [hosts.host_key(host.name) for host in in_order]
    if sorted(names) == sorted(planned):
        return [planned[name] for name in names]
    return list(range(len(in_order)))


def own_addresses(spec: LaunchSpec) -> list[str]:
    """Return the addresses at which the hosts can reach this process, the best first."""
    if os.environ.get(ADDRESS_VARIABLE):
        return [os.environ[ADDRESS_VARIABLE]]
    others = [name for name in spec.hosts.value if not hosts.is_here(name)]
    if not others:
        return ["127.0.0.1"]
    suffix = spec.machine.value.host_suffix
    addresses: list[str] = []
    for name in (hosts.host_key(others[0]) + suffix, others[0]):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket sends nothing. It makes the kernel choose which of our addresses leads
            # there.
            probe.connect((name, 9))
            addresses.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    real = [address for address in dict.fromkeys(addresses) if not address.startswith("127.")]
    return real or ["127.0.0.1"]
