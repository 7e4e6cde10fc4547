"""The machine model: every number that a prediction assumes, by name and with its source.

A file of `sites/` beside this one, of ``--machine FILE``, or written by ``mmm plan --calibrate``. Rates are per device
and direction, of the maker's data sheet unless the source says otherwise; what a program reaches of them are the fields
that end in ``_efficiency``.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError
from mmm.outside import read_json, short

BUILT_IN = Path(__file__).parent / "sites"
UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
SCHEDULERS = ("pbs", "slurm", "")


@dataclass(frozen=True)
class Machine:
    """Hosts of devices, and the links between them.

    Attributes:
        about: one line. accelerator: a key of `mmm.plan.utilization.PEAKS`, where its peaks are; else `peak_flops`.
        device: cuda, xpu or cpu. site: of `mmm.launch.plan.sites`, whose ranks and devices it has. scheduler: pbs,
            slurm or none. script: lines of a job script after the shell's, ``{hosts}`` filled in.
        hosts: that there are. gpus_per_host: devices, with one rank each. gpu_memory, host_memory: bytes.
        peak_flops: dtype → FLOP/s of dense matrix products. memory_bandwidth: bytes/s of the device's memory.
        link_bandwidth, link_latency: between two devices of a host, bytes/s and s.
        network_bandwidth: of all adapters of a host together, bytes/s. network_latency: s between hosts.
        host_link_bandwidth: bytes/s between a device and the host's memory. host_memory_bandwidth: of a host, bytes/s.
        matmul_efficiency, memory_efficiency, link_efficiency, network_efficiency: what is reached of each peak.
        overlap: the part of compute that communication of data parallelism and of a ring of cp can hide behind.
        layer_overhead: s that the host needs to start the kernels of a layer's forward; a layer takes no less.
        tensor_overhead: s that it needs beyond that where the layer is sharded over tp: what DTensor looks up for each
            operation.
        cores: of a host, where the devices are ranks on its CPU, whose rates are those of one core; else 0.
        memory_reserve: part of gpu_memory that context, communication library and fragmentation take.
        sources: field → where its value is from.
    """

    name: str
    about: str = ""
    accelerator: str = ""
    device: str = "cuda"
    site: str = ""
    scheduler: str = ""
    script: tuple[str, ...] = ()
    hosts: int = 1
    gpus_per_host: int = 1
    gpu_memory: float = 0.0
    host_memory: float = 0.0
    peak_flops: dict[str, float] = field(default_factory=dict)
    memory_bandwidth: float = 0.0
    link_bandwidth: float = 0.0
    link_latency: float = 0.0
    network_bandwidth: float = 0.0
    network_latency: float = 0.0
    host_link_bandwidth: float = 0.0
    host_memory_bandwidth: float = 0.0
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    network_efficiency: float = 0.8
    overlap: float = 0.9
    layer_overhead: float = 0.0
    tensor_overhead: float = 0.0
    memory_reserve: float = 0.08
    cores: int = 0
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def budget(self) -> float:
        """Bytes of a device that a program can have."""
        return self.gpu_memory * (1 - self.memory_reserve)

    def peak(self, dtype: str) -> float:
        """FLOP/s of one device at most.

        Raises:
            ConfigError: the machine has no such rate.
        """
        if self.peak_flops.get(dtype):
            return self.peak_flops[dtype]
        from mmm.plan.utilization import named_peak

        known = named_peak(self.accelerator, dtype)
        if known is None:
            raise ConfigError(
                f"--dtype {dtype}: machine {self.name} has no rate for it; use another, or --machine FILE"
            )
        return known

    def bandwidth(self, local: int, hosts: bool) -> float:
        """Bytes/s at which a ring of ranks moves a buffer.

        Args:
            local: ranks of the group on a host. hosts: whether it is on several. The rings of a group use the adapters
                of all its local ranks, and are no faster than the links inside the host.
        """
        inside = self.link_bandwidth * self.link_efficiency
        if not hosts:
            return inside
        outside = self.network_bandwidth * self.network_efficiency * local / self.gpus_per_host
        return min(inside, outside) if local > 1 else outside

    def explain(self) -> list[str]:
        """A line a field: its value, and where it is from."""
        lines = []
        for name, value in asdict(self).items():
            if name in ("name", "about", "sources", "script", "site", "scheduler") or value in ("", 0.0, {}, ()):
                continue
            text = ", ".join(f"{k} {v:.4g}" for k, v in value.items()) if isinstance(value, dict) else _number(value)
            lines.append(f"{name:<22} {text:<14} {self.sources.get(name, 'assumed')}")
        return lines


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def parse_bytes(text: str, flag: str) -> float:
    """``64GiB``, ``80GB``, ``1.5TiB`` → bytes.

    Raises:
        ConfigError: no number, no such unit, or not above 0.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    units = {unit.lower(): size for unit, size in UNITS.items()}
    unit = match[2].lower() if match else ""
    if not number > 0 or not math.isfinite(number):
        raise ConfigError(f"{flag} {text}: write a number above 0 and a unit, such as 64GiB")
    if unit not in units:
        raise ConfigError(f"{flag} {text}: the unit is none of {', '.join(filter(None, UNITS))}; such as 64GiB")
    if unit in ("", "b") and number < 1e6:
        raise ConfigError(f"{flag} {text}: that is {number:g} bytes; give a unit, such as {text.strip('bB ')}GiB")
    return number * units[unit]


def calibrated_path() -> Path:
    """Where `mmm plan --calibrate` keeps what it measures of this host."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "mmm" / f"machine-{socket.gethostname()}.json"


def known_here(device: str, site: str | None, hosts: int, ranks: int, threads: int = 1) -> Machine | None:
    """The machine that a run is on, as far as its rates are known: measured on this host, or by the site's data file.

    Args:
        device: type of the run's device. site: name of the site, None where there is none. ranks: of the run.
        threads: of a rank on a CPU: so many times the rate of one, which is optimistic.

    Raises:
        ConfigError: the file is wrong, or has no rate for several hosts.
    """
    path = calibrated_path()
    if hosts == 1 and os.path.exists(path):
        machine = load(str(path), "--machine")
    elif site is not None and site.lower() in known_machines():
        machine = load(site, "--site")
    else:
        return None
    if machine.device != device:
        return None
    there: dict[str, Any] = {"hosts": hosts, "gpus_per_host": -(-ranks // hosts)}
    if device == "cpu" and threads > 1:
        there["peak_flops"] = {name: threads * rate for name, rate in machine.peak_flops.items()}
        there |= {"memory_bandwidth": threads * machine.memory_bandwidth, "cores": -(-machine.cores // threads)}
    return changed(machine, there)


def known_machines() -> dict[str, Path]:
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.json"))}


def load(name_or_path: str, flag: str) -> Machine:
    """A machine of `sites/` by name, or of a file.

    Raises:
        ConfigError: there is none, or the file is wrong.
    """
    known = known_machines()
    path = known.get(name_or_path.lower(), Path(name_or_path)) if flag == "--site" else Path(name_or_path)
    if flag == "--site" and name_or_path.lower() not in known:
        near = difflib.get_close_matches(name_or_path.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}; --machine FILE reads others"
        raise ConfigError(f"--site {name_or_path}: not known; {hint}")
    return read(read_json(path, ConfigError, name=f"{flag} {path}"), f"{flag} {path.name}")


def read(data: Any, where: str) -> Machine:
    """Raises ConfigError where `data` is no machine: a field that is not known, or of another type."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ConfigError(f'{where}: it has to be one JSON object with a "name"')
    kinds = {f.name: getattr(Machine, f.name, f.name) for f in fields(Machine)}
    kinds |= {"peak_flops": {}, "sources": {}, "script": ()}
    for name, value in data.items():
        if name not in kinds:
            near = difflib.get_close_matches(name[:100], kinds, n=1)
            raise ConfigError(f"{where}: {short(name)} is not known" + (f"; did you mean {near[0]!r}?" if near else ""))
        wanted = kinds[name]
        numeric = isinstance(wanted, int | float)
        right = (
            isinstance(value, int | float) and not isinstance(value, bool)
            if numeric
            else isinstance(value, list if wanted == () else type(wanted))
        )
        if right and numeric and not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {name!r} is {value!r}: it must not be negative")
        if not right or (isinstance(wanted, int) and value != int(value)) or not _inner_types(name, value):
            raise ConfigError(
                f"{where}: {name!r} is {short(value)}, which is no {'number' if numeric else type(wanted).__name__}"
            )
    machine = Machine(**{**data, "script": tuple(data.get("script", ()))})
    return check(machine, where)


def _inner_types(name: str, value: Any) -> bool:
    """Whether the elements of a list or an object are what the field has."""
    if name == "peak_flops":
        return all(type(rate) in (int, float) and 0 <= rate < math.inf for rate in value.values())
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(isinstance(each, str) for each in inner)


def check(machine: Machine, where: str) -> Machine:
    """`machine`, if a prediction can be made with it. Raises ConfigError."""
    for name in ("hosts", "gpus_per_host", "gpu_memory", "memory_bandwidth"):
        if not getattr(machine, name) > 0:
            raise ConfigError(f"{where}: {name} is {getattr(machine, name)}: it must be above 0")
    needed = ("link_bandwidth",) * (machine.gpus_per_host > 1) + ("network_bandwidth",) * (machine.hosts > 1)
    for name in needed:
        if not getattr(machine, name) > 0:
            raise ConfigError(f"{where}: {name} is {getattr(machine, name):g}, and there are {machine.ranks} devices")
    for name in ("matmul_efficiency", "memory_efficiency", "link_efficiency", "network_efficiency"):
        if not 0 < getattr(machine, name) <= 1:
            raise ConfigError(f"{where}: {name} {getattr(machine, name)}: it must be above 0 and at most 1")
    if not 0 <= machine.overlap <= 1 or not 0 <= machine.memory_reserve < 1:
        raise ConfigError(f"{where}: overlap and memory_reserve are parts of 1")
    if machine.scheduler not in SCHEDULERS:
        raise ConfigError(f"{where}: scheduler {machine.scheduler!r} is none of pbs, slurm")
    return machine


def changed(machine: Machine, given: Mapping[str, Any]) -> Machine:
    """`machine` with what the command line says: those of `given` that are not None."""
    found = {name: value for name, value in given.items() if value is not None}
    sources = {**machine.sources, **dict.fromkeys(found, "the command line")}
    return check(replace(machine, **found, sources=sources), "machine")


def check_batch(global_batch: int, seq_length: int) -> None:
    """Raises ConfigError for a batch or a sequence that no machine takes."""
    if not 1 <= global_batch <= 10**7:
        raise ConfigError(f"--global_batch {global_batch}: it must be from 1 to 10,000,000 samples")
    if not 1 <= seq_length <= 10**8:
        raise ConfigError(f"--seq_length {seq_length}: it must be from 1 to 100,000,000 tokens")
