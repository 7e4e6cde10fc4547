"""A known machine: what `launch` sets on it, and the numbers that a prediction assumes, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mmm_launch.errors import MachineError, did_you_mean
from mmm_launch.files import read_json, short


@dataclass(frozen=True)
class Machine:
    """A machine: its hosts and their devices, how ranks are started on them, and the rates that programs reach.

    Every field except `name` may be missing in the machine's file: 0 and "" stand for a value that it does not give.

    Rates, from `accelerator` on, are for one device and one direction. They are those of the maker's data sheet unless
    the source says otherwise. The fields that end in ``_efficiency`` say which fraction of them a program reaches.

    Attributes:
        about: a description in one line.
        source: web page of the values that launch sets, unless `sources` names another.
        match: environment variable → regular expression. The machine is recognised if one of them fits.
        scheduler: "pbs", "slurm" or "flux".
        script: lines of a job script after its first one. ``{hosts}``, ``{time}``, ``{queue}`` and ``{project}`` are
            filled in.
        queue: the queue of jobs that do not name another.
        queues: limits of each queue, in hosts and hours of a job, such as "prod 10-24 3h". A queue may have several.
        setup: lines of a job script that load modules, such as Python's, or a plugin for the network.
        device: type of the devices: cuda, xpu or cpu.
        hosts: number of hosts.
        ranks_per_host: number of devices of a host, with one rank each.
        cpus_per_host: number of CPUs of a host.
        mpi: "pals", "hydra" or "openmpi", for an mpiexec that does not tell its kind.
        backend: backend of torch.distributed.
        device_variable: the variable that shows a rank its device.
        device_order: device numbers of local rank 0, 1, … of a host.
        bind: how launch binds ranks to CPUs.
        srun: more options for srun, which starts one process on each host. ``{cpus}`` becomes `cpus_per_host`, and
            ``{gpus}`` becomes `ranks_per_host`.
        host_suffix: suffix that makes a host's name an address on the fast network, for MASTER_ADDR.
        port: MASTER_PORT of the first attempt.
        env: variables for every rank, such as NCCL_SOCKET_IFNAME, unless the user has set them.
        advice: lines about what launch cannot do. They are printed if ranks are on several hosts.
        faults: name → whose fault it is if a regular expression occurs in a line that was printed, and the expression,
            such as "host: GPU is lost". "host": --retries leaves the host out. "program": the same would fail again.
            "passes": it passes by itself.
        accelerator: name of the device, by which its peak rates are found if `peak_flops` lacks them.
        gpu_memory: memory of a device, in bytes.
        host_memory: memory of a host, in bytes.
        peak_flops: dtype → FLOP/s of dense matrix products.
        memory_bandwidth: bytes/s of the device's memory.
        link_bandwidth: bytes/s between two devices of a host.
        link_latency: seconds of a message between two devices of a host.
        network_bandwidth: bytes/s of all network adapters of a host together.
        network_latency: seconds of a message between hosts.
        host_link_bandwidth: bytes/s between a device and its host's memory.
        host_memory_bandwidth: bytes/s of a host's memory.
        matmul_efficiency: fraction of `peak_flops` that matrix products reach.
        memory_efficiency: fraction of `memory_bandwidth` that kernels reach.
        link_efficiency: fraction of `link_bandwidth` that collectives reach.
        network_efficiency: fraction of `network_bandwidth` that collectives reach.
        overlap: fraction of the compute time behind which communication of data parallelism, and of a ring of cp, can
            hide.
        layer_overhead: seconds that the host needs to start the kernels of a layer's forward pass, which therefore
            takes at least as long.
        tensor_overhead: seconds that the host needs in addition if the layer is sharded over tp: DTensor looks up each
            operation.
        memory_reserve: fraction of `gpu_memory` that the context, the communication library and fragmentation take.
        cores: number of cores of a host whose devices are ranks on its CPU. Rates are then those of one core. Else 0.
        sources: field, or variable in `env`, or name in `faults`, → where its value is from.
        file: path of the file that the machine was read from. It is not a key of the file.
    """

    name: str
    about: str = ""
    source: str = ""
    match: dict[str, str] = field(default_factory=dict)
    scheduler: str = ""
    script: list[str] = field(default_factory=list)
    queue: str = ""
    queues: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    device: str = ""
    hosts: int = 0
    ranks_per_host: int = 0
    cpus_per_host: int = 0

    mpi: str | None = None
    backend: str = ""
    device_variable: str = ""
    device_order: list[int] = field(default_factory=list)
    bind: str | None = None
    srun: list[str] = field(default_factory=list)
    host_suffix: str = ""
    port: int = 0
    env: dict[str, str] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)

    accelerator: str = ""
    gpu_memory: float = 0.0
    host_memory: float = 0.0
    peak_flops: dict[str, float] = field(default_factory=dict)
    memory_bandwidth: float = 0.0
    link_bandwidth: float = 0.0
    link_latency: float = 6e-6
    network_bandwidth: float = 0.0
    network_latency: float = 1.5e-5
    host_link_bandwidth: float = 0.0
    host_memory_bandwidth: float = 0.0
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    network_efficiency: float = 0.8
    overlap: float = 0.9
    layer_overhead: float = 6e-4
    tensor_overhead: float = 0.0
    memory_reserve: float = 0.08
    cores: int = 0

    sources: dict[str, str] = field(default_factory=dict)
    file: str = ""

    def variables(self) -> dict[str, tuple[str, str]]:
        """Return the variables for every rank: name → value and source."""
        variables = {}
        for name, value in self.env.items():
            source = "env"
            if name in self.sources:
                source = name
            variables[name] = (value, self.source_of(source))
        return variables

    def source_of(self, name: str) -> str:
        """Return the machine's name, and the page from which the value of a field or variable is."""
        return f"{self.name}: {self.sources.get(name, self.source)}".removesuffix(": ")

    def srun_arguments(self) -> list[str]:
        """Return the options of `srun` with ``{cpus}`` and ``{gpus}`` filled in."""
        cpus = max(1, self.cpus_per_host)
        gpus = self.ranks_per_host or 1
        return [argument.format(cpus=cpus, gpus=gpus) for argument in self.srun]

    @property
    def ranks(self) -> int:
        """Number of devices of all hosts together."""
        return self.hosts * self.ranks_per_host

    @property
    def budget(self) -> float:
        """Bytes of a device's memory that a program can use."""
        return self.gpu_memory * (1 - self.memory_reserve)

    def bandwidth(self, local: int, hosts: bool) -> float:
        """Return the bytes/s at which a ring of ranks moves a buffer.

        Args:
            local: number of the group's ranks on one host.
            hosts: whether the group is on several hosts.
        """
        inside = self.link_bandwidth * self.link_efficiency
        if not hosts:
            return inside
        # A group's rings use the network adapters of all of its local ranks, and pass the links inside each host.
        outside = self.network_bandwidth * self.network_efficiency * local / self.ranks_per_host
        if local == 1:
            return outside
        return min(inside, outside)

    def missing(self) -> list[str]:
        """Return the fields that the file does not have, but that a prediction needs."""
        needed = ["gpu_memory", "memory_bandwidth"]
        if self.ranks_per_host > 1:
            needed.append("link_bandwidth")
        if self.hosts > 1:
            needed.append("network_bandwidth")
        return [name for name in needed if not getattr(self, name) > 0]

    def changed(self, values: Mapping[str, Any]) -> Machine:
        """Return the machine for a prediction: with one host of one device where its file does not say how many.

        Args:
            values: field → value of the command line, which replaces the machine's. None: the machine's counts.

        Raises:
            MachineError: names the fields that are missing.
        """
        chosen = {name: value for name, value in values.items() if value is not None}
        sources = {**self.sources, **dict.fromkeys(chosen, "the command line")}
        usual = {
            "device": self.device or "cuda",
            "hosts": self.hosts or 1,
            "ranks_per_host": self.ranks_per_host or 1,
        }
        machine = replace(self, **{**usual, **chosen}, sources=sources)
        missing = machine.missing()
        if missing:
            noun = "devices"
            if machine.ranks == 1:
                noun = "device"
            raise MachineError(
                f"machine file {self.file or self.name}: mmm plan needs {', '.join(missing)} of {machine.ranks:,} "
                f"{noun}, and the file has none"
            )
        return machine


# Field → its type, as JSON has it.
FIELDS = {f.name: str(f.type).removesuffix(" | None") for f in fields(Machine) if f.name != "file"}
NUMBERS = (int, float)
# Type of a field → the Python types of its value, and of the elements of a list or dict.
TYPES: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "str": ((str,), (str,)),
    "int": ((int,), (int,)),
    "float": (NUMBERS, NUMBERS),
    "list[str]": ((list,), (str,)),
    "list[int]": ((list,), (int,)),
    "dict[str, str]": ((dict,), (str,)),
    "dict[str, float]": ((dict,), NUMBERS),
}
# Fields whose names end so are fractions, at most 1.
FRACTIONS = ("efficiency", "overlap", "reserve")
LARGEST = 1e30
QUEUE = re.compile(r"(\S+) (\d{1,6})-(\d{1,6}) (\d{1,5})h")
# Field → the form of each of its texts, and this form in words.
WRITTEN = {
    "mpi": (re.compile("pals|hydra|openmpi"), "pals, hydra or openmpi"),
    "scheduler": (re.compile("pbs|slurm|flux"), "pbs, slurm or flux"),
    "faults": (
        re.compile("(host|program|passes): .+"),
        'written as "host: REGEX", "program: REGEX" or "passes: REGEX"',
    ),
    "queues": (QUEUE, 'written as "prod 10-24 3h"'),
    "srun": (re.compile(r"([^{}]|\{cpus\}|\{gpus\})*"), "text in which only {cpus} and {gpus} are filled in"),
}


def read(path: Path | str) -> Machine:
    """Read the machine of one file. Raises `MachineError` with the file's name and what is wrong in it."""
    where = f"machine file {path}"
    return parse(read_json(Path(path), MachineError, name=where), where, str(path))


def parse(data: dict[str, Any], where: str, file: str = "") -> Machine:
    """Make a machine of what a file contains.

    Args:
        data: the JSON object of the file.
        where: the beginning of messages, which names the file.
        file: path of the file.

    Raises:
        MachineError: a field is not known, has another type, or has a value that is impossible.
    """
    for name, value in data.items():
        if name not in FIELDS:
            hint = did_you_mean(name, FIELDS)
            raise MachineError(f"{where}: {short(name)} is not known.{hint} There are {', '.join(FIELDS)}.")
        needed = _needed(name, value)
        if needed:
            raise MachineError(f"{where}: {name!r} is {short(value)}; it has to be {needed}.")
    if not data.get("name"):
        raise MachineError(f'{where}: it has to be one JSON object with a "name".')
    return Machine(**data, file=file)


def _needed(name: str, value: Any) -> str:
    """Return in words what the field has to be; "" if the value is fine."""
    value_types, element_types = TYPES[FIELDS[name]]
    elements = [value]
    if isinstance(value, dict):
        elements = list(value.values())
    elif isinstance(value, list):
        elements = value
    # type(), not isinstance(): True is an int, too.
    if type(value) not in value_types or any(type(element) not in element_types for element in elements):
        return f"of type {FIELDS[name]}"
    most = LARGEST
    if name.endswith(FRACTIONS):
        most = 1
    pattern, in_words = WRITTEN.get(name, (None, ""))
    for element in elements:
        # NaN fails this comparison as well.
        if not isinstance(element, str) and not 0 <= element <= most:
            return f"from 0 to {most:g}"
        if pattern is not None and not pattern.fullmatch(element):
            return in_words
        if name in ("match", "faults"):
            try:
                re.compile(element)
            except re.error as error:
                return f"a regular expression: {error}"
    return ""
