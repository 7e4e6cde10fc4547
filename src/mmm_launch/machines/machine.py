"""A known machine: what `launch` sets on it, and every number that a prediction assumes, by name, with its source."""

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
    """Hosts of devices, how ranks are started on them, and what they reach. Every field but `name` may be left out of
    its file: 0 and "" stand for what it does not say.

    In `srun`, `{cpus}` is the CPUs of a host (`cpus_per_host`), `{gpus}` its accelerators (`ranks_per_host`).

    Rates, from `accelerator` on, are per device and direction, of the maker's data sheet unless the source says
    otherwise; what a program reaches of them are the fields that end in ``_efficiency``.

    Attributes:
        about: one line. source: the page of what launch sets, where `sources` does not name another.
        match: environment variable → regular expression; the machine is recognised where one of them is found.
        scheduler: "pbs" or "slurm". script: lines of a job script after the shell's, ``{hosts}``, ``{time}``,
            ``{queue}`` and ``{project}`` filled in. queue: where jobs go if nothing else is said.
        queues: what each takes, hosts and hours of a job, such as "prod 10-24 3h"; a queue may have several of these.
        setup: lines of a job script that load what the machine has: modules of Python, of a plugin for its network.
        device: cuda, xpu or cpu. hosts: that there are. ranks_per_host: devices, with one rank each.
        mpi: "pals", "hydra" or "openmpi", for an mpiexec that does not say what it is. backend: of torch.distributed.
        device_variable, device_order: local rank i is shown only device `device_order[i]`, by that variable.
        bind: how launch binds ranks.
        srun: further arguments of srun, which starts one process a host.
        host_suffix: what makes a host's name an address on the fast network, for MASTER_ADDR. port: MASTER_PORT.
        env: variables for every rank, such as NCCL_SOCKET_IFNAME, unless the user has set them.
        advice: what launch cannot do, a line each; said where ranks are on several hosts.
        accelerator: name of the device, by which its peak rates are found where `peak_flops` has none.
        gpu_memory, host_memory: bytes. peak_flops: dtype → FLOP/s of dense matrix products.
        memory_bandwidth: bytes/s of the device's memory.
        link_bandwidth, link_latency: between two devices of a host, bytes/s and s.
        network_bandwidth: of all adapters of a host together, bytes/s. network_latency: s between hosts.
        host_link_bandwidth: bytes/s between a device and the host's memory. host_memory_bandwidth: of a host, bytes/s.
        matmul_efficiency, memory_efficiency, link_efficiency, network_efficiency: what is reached of each peak.
        overlap: the part of compute that communication of data parallelism and of a ring of cp can hide behind.
        layer_overhead: s that the host needs to start the kernels of a layer's forward; a layer takes no less.
        tensor_overhead: s that it needs beyond that where the layer is sharded over tp: what DTensor looks up for each
            operation.
        memory_reserve: part of gpu_memory that context, communication library and fragmentation take.
        cores: of a host, where the devices are ranks on its CPU, whose rates are those of one core; else 0.
        sources: field, or variable in `env`, → where its value is from.
        file: that it was read from; no key of it.
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
        """Variable → value and source, of every rank."""
        found = {}
        for name, value in self.env.items():
            found[name] = value, self.source_of(name if name in self.sources else "env")
        return found

    def source_of(self, name: str) -> str:
        """The machine's name, and the page that a field or variable of launch's is from."""
        return f"{self.name}: {self.sources.get(name, self.source)}".removesuffix(": ")

    def srun_arguments(self) -> list[str]:
        """`srun` with its `{…}` filled in."""
        cpus = max(1, self.cpus_per_host)
        gpus = self.ranks_per_host or 1
        return [argument.format(cpus=cpus, gpus=gpus) for argument in self.srun]

    @property
    def ranks(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def budget(self) -> float:
        """Bytes of a device that a program can have."""
        return self.gpu_memory * (1 - self.memory_reserve)

    def bandwidth(self, local: int, hosts: bool) -> float:
        """Bytes/s at which a ring of ranks moves a buffer.

        Args:
            local: ranks of the group on a host. hosts: whether it is on several. The rings of a group use the adapters
                of all its local ranks, and are no faster than the links inside the host.
        """
        inside = self.link_bandwidth * self.link_efficiency
        if not hosts:
            return inside
        outside = self.network_bandwidth * self.network_efficiency * local / self.ranks_per_host
        return min(inside, outside) if local > 1 else outside

    def missing(self) -> list[str]:
        """The fields that a prediction cannot be made without, and that the file does not have."""
        needed = ["gpu_memory", "memory_bandwidth"]
        needed += ["link_bandwidth"] * (self.ranks_per_host > 1) + ["network_bandwidth"] * (self.hosts > 1)
        return [name for name in needed if not getattr(self, name) > 0]

    def changed(self, values: Mapping[str, Any]) -> Machine:
        """What a prediction is made for: this machine, on one host and with one rank where its file does not say.

        Args:
            values: field → value of the command line, which counts instead; None: the machine's.

        Raises:
            MachineError: names the fields that are missing.
        """
        chosen = {name: value for name, value in values.items() if value is not None}
        sources = {**self.sources, **dict.fromkeys(chosen, "the command line")}
        usual = {"device": self.device or "cuda", "hosts": self.hosts or 1, "ranks_per_host": self.ranks_per_host or 1}
        machine = replace(self, **{**usual, **chosen}, sources=sources)
        if missing := machine.missing():
            raise MachineError(
                f"machine file {self.file or self.name}: mmm plan needs {', '.join(missing)} of {machine.ranks:,} "
                f"device{'s' * (machine.ranks > 1)}, and the file has none"
            )
        return machine


# Field → its type, as JSON has it.
FIELDS = {f.name: str(f.type).removesuffix(" | None") for f in fields(Machine) if f.name != "file"}
NUMBERS = (int, float)
# Type of a field → those of the whole, and of what is in it.
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
PARTS = ("efficiency", "overlap", "reserve")
LARGEST = 1e30
QUEUE = re.compile(r"(\S+) (\d{1,6})-(\d{1,6}) (\d{1,5})h")
# Field → how each of its texts is written, and that in words.
WRITTEN = {
    "mpi": (re.compile("pals|hydra|openmpi"), "pals, hydra or openmpi"),
    "scheduler": (re.compile("pbs|slurm"), "pbs or slurm"),
    "queues": (QUEUE, 'written as "prod 10-24 3h"'),
    "srun": (re.compile(r"([^{}]|\{cpus\}|\{gpus\})*"), "text in which only {cpus} and {gpus} are filled in"),
}


def read(path: Path | str) -> Machine:
    """The machine of one file. Raises MachineError, with the file's name and what is wrong in it."""
    where = f"machine file {path}"
    return parse(read_json(Path(path), MachineError, name=where), where, str(path))


def parse(data: dict[str, Any], where: str, file: str = "") -> Machine:
    """The machine of what a file says.

    Args:
        where: the beginning of messages.

    Raises:
        MachineError: a field that is not known, of another type, or that cannot be.
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
    """What the field has to be; "" where the value is that."""
    wholes, parts = TYPES[FIELDS[name]]
    elements = [value]
    if isinstance(value, dict):
        elements = list(value.values())
    elif isinstance(value, list):
        elements = value
    if type(value) not in wholes or any(type(element) not in parts for element in elements):
        return f"of type {FIELDS[name]}"
    most = 1 if name.endswith(PARTS) else LARGEST
    pattern, in_words = WRITTEN.get(name, (None, ""))
    for element in elements:
        # NaN fails this comparison as well.
        if not isinstance(element, str) and not 0 <= element <= most:
            return f"from 0 to {most:g}"
        if pattern is not None and not pattern.fullmatch(element):
            return in_words
        if name == "match":
            try:
                re.compile(element)
            except re.error as error:
                return f"a regular expression: {error}"
    return ""
