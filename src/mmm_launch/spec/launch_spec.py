"""What is to be started, on this host alone or on many; each value with where it came from."""

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
    """A value, and in words where it came from; "": nothing is to be said. is_wish: another may take its place."""

    value: T
    source: str
    is_wish: bool = False


@dataclass(frozen=True)
class LaunchSpec:
    """Everything that a run needs.

    Attributes:
        launcher: `LOCAL`; "srun", "hydra", "pals" or "openmpi".
        hosts: those used, in order. counts: how many ranks each has; the first has ranks 0 … counts[0] − 1.
        device: torch's device type, where one was chosen or found.
        shared: variables for every rank.
        threads: OMP_NUM_THREADS; None: of the cores that ranks have.
        prefork: whether ranks may be forked.
        bind: how launch binds ranks to CPUs; None: it does not.
        notes: said before the start.
        command: the launcher backend's whole command line.
        machine: the known machine's data, or the empty `Machine`.
        device_order: its devices for local rank 0, 1, … of a host.
        environ: what the launcher backend itself gets on top of launch's environment.
        elastic: what --elastic asks for. spare: hosts that take the place of lost ones.
        places: of a later attempt of an elastic run, the numbers on each host of the places in use; empty: the first.
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
        """Those of `shared`, for the ranks."""
        return {name: variable.value for name, variable in self.shared.items()}

    @property
    def ranks(self) -> int:
        """In all."""
        return sum(self.counts.value)

    @property
    def processes(self) -> int:
        """How many mpiexec or srun starts: one a host."""
        return len(self.hosts.value)

    def order_on(self, host: int) -> tuple[str, list[int]]:
        """The variable that shows a rank its device, and the devices of local rank 0, 1, … of a host. None where every
        rank sees all. In an elastic run a place is a device, also where another rank takes it."""
        variable = self.machine.value.device_variable
        order = self.device_order
        places = self.places[host] if self.places else []
        if places != list(range(len(places))):
            variable = variable or DEVICE_VARIABLES.get(self.device.value or "", "")
            shown = [device for device in os.environ.get(variable, "").split(",") if device.isdigit()]
            everyone = order or [int(device) for device in shown] or list(range(max(places) + 1))
            order = [everyone[place] for place in places]
        return variable, order if variable else []

    def host_command(self, host: int, first: int, shared: dict[str, str]) -> dict[str, Any]:
        """What a host is told: `host_spec.make` reads it, on that host.

        Args:
            host: its place in `hosts`. first: its first rank. shared: variables for every rank.
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
