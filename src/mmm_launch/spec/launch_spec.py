"""The spec of a run: what is started, on this host or on many. Each value says where it came from."""

import os
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mmm_launch.machines.machine import Machine
from mmm_launch.program.target import Target
from mmm_launch.spec.hosts import Job
from mmm_launch.spec.options import Elastic
from mmm_launch.spec.stage import Stage

T = TypeVar("T")
DEVICE_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
# The launcher of ranks on this host only: launch starts and supervises them itself.
LOCAL = "local"


@dataclass(frozen=True)
class Value(Generic[T]):
    """A value of the spec, and where it came from.

    Attributes:
        value: the value.
        source: where it came from, in words; "": there is nothing to say.
        is_wish: the first host may replace it by another, such as a port that is free there.
    """

    value: T
    source: str
    is_wish: bool = False


@dataclass(frozen=True)
class LaunchSpec:
    """Everything that a run needs.

    Attributes:
        target: what each rank runs.
        launcher: what starts processes on the hosts: `LOCAL`, "srun", "flux", "hydra", "pals" or "openmpi".
        job: the scheduler's job, if there is one.
        hosts: names of the hosts that are used, in order.
        counts: number of ranks on each host. The first has ranks 0 … counts[0] − 1.
        device: torch's device type, where one was chosen or found.
        shared: environment variables for every rank.
        threads: OMP_NUM_THREADS. None: each host counts the cores that its ranks have.
        prefork: whether ranks may be forked from one process.
        bind: how launch binds ranks to CPUs. None: it does not.
        notes: lines that launch prints before the start.
        stage: the environment that is copied to every host (--stage).
        machine: the known machine's data, or an empty `Machine`.
        command: the whole command line of mpiexec or srun.
        device_order: numbers of the machine's devices for local rank 0, 1, … of a host.
        environ: variables that mpiexec or srun gets in addition to launch's environment.
        elastic: what --elastic asks for.
        spare: names of hosts that take the place of lost ones.
        places: in a later attempt, the numbers of the places in use on each host. Empty: all.
    """

    target: Target
    launcher: Value[str]
    job: Job
    hosts: Value[tuple[str, ...]]
    counts: Value[tuple[int, ...]]
    device: Value[str | None]
    shared: dict[str, Value[str]]
    threads: Value[str | None]
    prefork: bool
    bind: Value[str | None]
    notes: tuple[str, ...]
    stage: Stage | None
    machine: Value[Machine]
    command: list[str]
    device_order: list[int]
    environ: dict[str, str]
    elastic: Elastic | None
    spare: tuple[str, ...]
    places: tuple[list[int], ...]

    @property
    def is_local(self) -> bool:
        """Whether launch itself holds the ranks, and no agent does."""
        return self.launcher.value == LOCAL

    @property
    def variables(self) -> dict[str, str]:
        """The variables of `shared`, without their sources."""
        return {name: variable.value for name, variable in self.shared.items()}

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts together."""
        return sum(self.counts.value)

    @property
    def processes(self) -> int:
        """Number of agents that mpiexec or srun starts: one on each host."""
        return len(self.hosts.value)

    def order_on(self, host: int) -> tuple[str, list[int]]:
        """Return which devices the ranks of a host are shown.

        Returns:
            The variable that shows a rank its device, and the device numbers for local rank 0, 1, …; no numbers where
            every rank sees all devices.
        """
        variable = self.machine.value.device_variable
        order = self.device_order
        places: list[int] = []
        if self.places:
            places = self.places[host]
        # In an elastic run a place stands for a device. Where a place in the middle has failed, the ranks behind it
        # move up, but have to stay off the failed device.
        if places != list(range(len(places))):
            variable = variable or DEVICE_VARIABLES.get(self.device.value or "", "")
            # What launch itself is shown, if a scheduler gives the job some devices of a host only.
            visible = os.environ.get(variable, "").split(",")
            devices = order or [int(device) for device in visible if device.isdigit()]
            if not devices:
                devices = list(range(max(places) + 1))
            order = [devices[place] for place in places]
        if not variable:
            return "", []
        return variable, order

    def host_command(self, host: int, first: int, shared: dict[str, str]) -> dict[str, Any]:
        """Return what a host's agent is told as JSON. `host_spec.make` reads it on that host.

        Args:
            host: index of the host in `hosts`.
            first: number of its first rank.
            shared: environment variables for every rank.
        """
        count = self.counts.value[host]
        variable, order = self.order_on(host)
        return {
            "first": first,
            "count": count,
            "device": self.device.value,
            "bind": self.bind.value,
            "prefork": self.prefork,
            "shared": shared | {"LOCAL_WORLD_SIZE": str(count)},
            "device_variable": variable,
            "device_order": order,
        }
