"""The agent, which mpiexec or srun starts on each host of a run: `python -m mmm_launch.host.agent …`.

It connects to launch and waits until it is told what to run. Then it starts the fork server of its host's ranks, as
launch itself does on one host, and passes messages on between the two. launch decides everything. The agent does not
import torch.

If launch is gone, the agent ends its ranks. If launch knows how the ranks ended, the agent's own exit code is 0: at any
other, mpiexec would kill the other agents and print a message of its own.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from mmm_launch.channel.failures import say
from mmm_launch.channel.instructions import PASSED_ON
from mmm_launch.channel.link import Lost, Message, SignedLink, connect, describe
from mmm_launch.contract import ENDING, NUMBERED_BY
from mmm_launch.errors import LaunchError, UserError
from mmm_launch.host import stage as stages
from mmm_launch.host.stage import Copy
from mmm_launch.program import target as targets
from mmm_launch.program.target import Target
from mmm_launch.run.server import LEFTOVER_GRACE, ForkServer
from mmm_launch.run.waking import Signals
from mmm_launch.spec import host_spec, hosts
from mmm_launch.spec.mpi import AGENT_VARIABLE
from mmm_launch.spec.stage import Stage

# Seconds to try one address of launch.
CONNECT_TIMEOUT = 10.0
# Seconds in which addresses are tried again where nobody answers: a name server may fail for a moment.
AGAIN = 3.0
MPI_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PALS_", "MPI_LOCAL", "HYDI_")
# Processes by which an MPI holds a host's ranks. One whose mpiexec was cut off would wait for it for good.
HELPERS = ("hydra_pmi_proxy", "orted", "prted")


def main() -> int:
    """Run the agent and return its exit code."""
    if AGENT_VARIABLE not in os.environ:
        say(
            f"launch: error: {AGENT_VARIABLE} is not in the environment of the agent: mpiexec or srun has to pass its "
            "environment on to all hosts"
        )
        return 2
    entry = json.loads(os.environ.pop(AGENT_VARIABLE))
    target = read_target(sys.argv[1:])
    # Slurm's own name for the host is the one in its lists of hosts.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    copy: Copy | None = None
    hello = {
        "host": host,
        "place": -1,
        "port": hosts.free_port(entry["port"]),
        "error": "",
    }
    code = 0
    with stages.ending_raises():
        try:
            # A mistake is told to launch in the first message: launch prints it once, not once per host.
            try:
                hello["place"] = own_place(entry["launcher"])
                if "stage" in entry:
                    copy = stages.unpack(Stage(**entry["stage"]))
            except UserError as error:
                hello["error"] = f"{error} (on {host})"
            link = reach(entry["at"], entry["token"], hello)
            message = link.first(None)
            if "go" in message:
                code = run_ranks(link, message["go"], entry, target, host, copy)
        except Lost as lost:
            say(f"launch: {host} cannot reach launch, or launch has ended: {lost}")
            end_helper()
            code = 1
        except SystemExit:
            # A signal has ended this process before it was told what to run.
            pass
        finally:
            if copy is not None:
                copy.remove()
    # At another exit code an MPI kills its other processes, which may still be removing their copies.
    if copy is not None:
        return 0
    return code


def run_ranks(
    link: SignedLink, command: dict[str, Any], entry: dict[str, Any], target: Target, host: str, copy: Copy | None
) -> int:
    """Start this host's ranks and serve launch until they have ended. Returns 1 if launch is gone, else 0."""
    if copy is not None:
        command["stage"] = {"source": entry["stage"]["source"], "copy": copy.path}
    try:
        spec = host_spec.make(target, command)
    except UserError as error:
        with contextlib.suppress(Lost):
            link.send({"refused": str(error)})
            link.send({"gone": 0})
        return 0
    for name in list(os.environ):
        if name.startswith(MPI_PREFIXES):
            # A rank with these variables would take itself for the MPI's process of the whole host.
            del os.environ[name]
    return Agent(link, spec, entry["launcher"], host).run()


class Agent:
    """Passes messages on between launch and the fork server, until the fork server has ended.

    Attributes:
        link: connection to launch.
        spec: what the fork server and its ranks get.
        launcher: kind of the program that has started this process: "srun", "flux", "hydra", "pals" or "openmpi".
        host: name of this host.
        goes_well: whether launch has not ended any rank so far.
    """

    def __init__(self, link: SignedLink, spec: host_spec.HostSpec, launcher: str, host: str) -> None:
        self.link = link
        self.spec = spec
        self.launcher = launcher
        self.host = host
        self.goes_well = True

    def run(self) -> int:
        """Pass messages on until the fork server has ended. Returns 1 if launch is gone, else 0."""
        signals = Signals()
        selector = selectors.DefaultSelector()
        signals.take(selector)
        server = ForkServer(self.spec, signals.ignored)
        try:
            selector.register(self.link, selectors.EVENT_READ)
            selector.register(server.link, selectors.EVENT_READ)
            # Messages that arrived together with the first one.
            for message in self.link.complete():
                self.obey(server, message)
            while self.serve(server, signals, selector):
                pass
            # After a failure ranks had their time to end. Only after a good run what they left gets a moment.
            grace = 0.0
            if self.goes_well:
                grace = LEFTOVER_GRACE
            self.link.send({"gone": server.finish(grace)})
            return 0
        except Lost as lost:
            say(f"launch: {self.host} has lost launch ({lost}): ending its ranks")
            server.close()
            end_helper()
            return 1
        finally:
            server.close()
            signals.give_back()

    def serve(self, server: ForkServer, signals: Signals, selector: selectors.BaseSelector) -> bool:
        """Wait for messages or signals, and pass them on.

        Returns:
            False once the fork server has ended.

        Raises:
            Lost: launch is gone.
        """
        ready = {key.fd for key, _ in selector.select()}
        for signum in signals.read(ready):
            self.on_signal(server, signum)
        if self.link.fileno() in ready:
            for message in self.link.read():
                self.obey(server, message)
        if server.link.fileno() in ready:
            try:
                messages = server.link.read()
            except Lost:
                return False
            for message in messages:
                self.link.send(message)
        return True

    def obey(self, server: ForkServer, message: Message) -> None:
        """Do what launch says. Most messages are for the fork server."""
        if "kill" in message:
            self.goes_well = False
            server.kill()
            return
        if "end" in message:
            self.goes_well = False
        server.send(message)

    def on_signal(self, server: ForkServer, signum: int) -> None:
        # mpiexec, srun or the scheduler ends this process. launch decides what follows.
        if signum in ENDING:
            self.link.send({"interrupted": signum})
        # Slurm signals every process of a step, the ranks too. An mpiexec signals only the agent.
        elif signum in PASSED_ON and self.launcher != "srun":
            server.send({"signal": signum})


def reach(addresses: list[list[Any]], token: str, hello: Message) -> SignedLink:
    """Connect to launch at the first of its addresses where it answers.

    Args:
        addresses: pairs of host name or address, and port.
        token: the run's secret.
        hello: the first message to launch.

    Raises:
        Lost: launch answers at none of them.
    """
    failed: dict[str, str] = {}
    until = time.monotonic() + AGAIN
    while True:
        for host, port in addresses:
            try:
                return connect((host, port), token, hello, CONNECT_TIMEOUT)
            except OSError as error:
                failed[f"{host}:{port}"] = describe(error)
            except Lost as error:
                failed[f"{host}:{port}"] = f"it is not of this run: {error}"
                # A stranger answers at launch's port, so launch is gone: do not try again.
                until = 0.0
        if time.monotonic() > until:
            raise Lost("; ".join(f"{where}: {why}" for where, why in failed.items()))
        time.sleep(0.2)


def own_place(launcher: str) -> int:
    """Return the number that `launcher` ("srun", "flux", "hydra", "pals" or "openmpi") has given this process.

    Raises:
        LaunchError: it has given none.
    """
    # The environment may also have the variables of another launcher: mpiexec inside a Slurm job, for example.
    name = NUMBERED_BY[launcher]
    place = os.environ.get(name, "")
    if not place.isdigit():
        raise LaunchError(
            f"{launcher} has given its process no number: {name} is not set. If this is another kind of MPI, name it: "
            "--mpi hydra|pals|openmpi"
        )
    return int(place)


def read_target(argv: list[str]) -> Target:
    """Read the target in the agent's own command line."""
    if argv[:1] == ["--exec"]:
        return Target("program", argv[1], command=tuple(argv[1:]))
    target = targets.from_tail(argv)
    if target is None:
        raise SystemExit("usage: python -m mmm_launch.host.agent (-m MODULE | -c CODE | SCRIPT | --exec PROGRAM) ARGS…")
    return target


def end_helper() -> None:
    """End the MPI's own process that holds this one, so that it does not wait for its mpiexec."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in HELPERS:
            os.kill(parent, signal.SIGTERM)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # mpiexec acts on this exit code: nothing that runs at an ordinary exit of Python may change it.
    os._exit(code)
