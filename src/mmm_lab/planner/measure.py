"""``mmm machine --measure``: what products, memory, layers and collectives reach here, as a machine file of one host,
whose efficiencies are 1 where its rates are what programs reach. Compute is that of one thread on a CPU."""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mmm.errors import ConfigError
from mmm.models.llama.model import Transformer, TransformerBlock, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.nn.rope import rotary_table
from mmm.parallel.collective_bytes import factor
from mmm.parallel.tp.tensor_parallel import apply_tensor_parallel
from mmm.runtime.cores import usable_cores
from mmm.runtime.device import choose_device, is_available, synchronize
from mmm.runtime.memory import device_memory, host_memory
from mmm.runtime.process_group import all_gather, process_group
from mmm.runtime.ranks import Rank
from mmm.torch_private.dry_run import register_fake_group
from mmm.units import counted
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.models import model_spec
from mmm_launch.machines.machine import Machine, parse
from mmm_verify.ranks import fork_ranks

TRIES, PATIENCE, RANKS = 12, 600.0, 2  # PATIENCE: s that the collectives may take on RANKS ranks
SMALL = 1 << 8  # elements of a collective, for its latency
BETWEEN, PRODUCTS, ROUNDS = 384, 3, 8  # rows and number of the products before each of the collectives of one try
TINY = TransformerConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=64, vocab_size=64)
USUAL = TransformerConfig(dim=256, n_layers=1, n_heads=8, n_kv_heads=8, ffn_dim=704, vocab_size=64)
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
# Of the largest product, what a model's reach on an accelerator: found on A100, and right on an H200 (docs/plan.md).
OF_LARGEST_PRODUCT = 0.75
EFFICIENCIES = ("matmul_efficiency", "memory_efficiency", "link_efficiency", "network_efficiency")


class Sizes(NamedTuple):
    """Rows of the square matrices, elements of the tensors that are added, and of a collective for its bandwidth. Large
    enough for the device: of a small product on an accelerator, no more is seen than how the host starts it."""

    product: int
    stream: int
    large: int


ON_CPU, ON_ACCELERATOR = Sizes(768, 1 << 24, 1 << 19), Sizes(8192, 1 << 28, 1 << 26)


def sizes_for(device: torch.device) -> Sizes:
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def devices_here(rank: Rank) -> tuple[str, int]:
    """Their kind and number. For a forked process: ranks forked from one that has looked could not use a device."""
    kind = next((kind for kind in ("cuda", "xpu") if is_available(kind)), "cpu")
    return kind, min(usable_cores(), 4) if kind == "cpu" else getattr(torch, kind).device_count()


def best_seconds(work: Callable[[], Any], device: torch.device, waits: bool = False) -> float:
    """Of some tries, after one that does not count. On a CPU only what this thread computes counts, so that other work
    on the host is not in it, unless `work` waits for other ranks."""
    clock = time.thread_time if device.type == "cpu" and not waits else time.perf_counter
    seconds = []
    for _ in range(TRIES + 1):
        begin = clock()
        work()
        synchronize(device)
        seconds.append(clock() - begin)
    return min(seconds[1:])


def forward_seconds(layer: nn.Module, config: TransformerConfig, device: torch.device, *sizes: int) -> float:
    """Of the forward of a layer. sizes: batch, sequence, and its positions that this rank has."""
    batch, seq, positions = sizes
    x = torch.zeros(batch, positions, config.dim, device=device)
    cos, sin = rotary_table(torch.arange(seq, device=device), config.head_dim, config.rope_theta)
    return best_seconds(lambda: layer(x, cos, sin), device)


def layer_traffic_rate(device: torch.device, product_rate: float, overhead: float) -> float:
    """Bytes/s at which a layer's element-wise kernels and attention go through memory: what is left of the seconds of
    its forward after its products, over the bytes that `CostModel` counts for them."""
    batch, seq = 4, 256
    spec = model_spec(USUAL, seq)
    kind = next(kind for kind in spec.kinds if kind.role == "layer")
    traffic = batch * seq * MemoryModel(spec, device.type, "fp32").kept(1, False).traffic
    products = batch * (kind.flops - kind.attention_flops / 2) / product_rate
    seconds = forward_seconds(TransformerBlock(USUAL).to(device), USUAL, device, batch, seq, seq)
    return traffic / max(seconds - products - overhead, 1e-12)


def tensor_parallel_seconds(device: torch.device) -> float:
    """Of the forward of a tiny layer that is sharded over tp. The other rank is not there: it is this host's part."""
    register_fake_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        model = Transformer(TINY).to(device)
        apply_tensor_parallel(model, init_device_mesh(device.type, (2,)), transformer_plan())
        return forward_seconds(model.layers["0"], TINY, device, 1, 4, 2)
    finally:
        dist.destroy_process_group()


def collective_seconds(rank: Rank, kind: str) -> dict[str, float]:
    """On each rank of a group: seconds that collectives add to the products between them. As in a step: a rank that
    computes comes late, one that waits has to be woken, and what a collective copies left the cache.

    Args:
        kind: of the ranks' devices.
    """
    device = choose_device(kind, rank)
    a, large = torch.ones(BETWEEN, BETWEEN, device=device), sizes_for(device).large

    def seconds_of(call: Callable[[], Any]) -> float:
        def work() -> None:
            for _ in range(ROUNDS):
                for _ in range(PRODUCTS):
                    a @ a
                call()

        return best_seconds(work, device, waits=True) / ROUNDS

    seconds: dict[str, float] = {}
    with process_group(rank, device, PATIENCE):
        alone = seconds_of(lambda: None)
        for count, name in ((SMALL, "small"), (large, "large")):
            part, summed = torch.ones(count, device=device), torch.ones(count, device=device)
            full = torch.empty(count * rank.world_size, device=device)
            dist.barrier()
            gathered = seconds_of(lambda full=full, part=part: all_gather(full, part))  # type: ignore[misc]
            dist.barrier()
            reduced = seconds_of(lambda summed=summed: dist.all_reduce(summed))  # type: ignore[misc]
            seconds |= {f"all_gather {name}": gathered - alone, f"all_reduce {name}": reduced - alone}
    return {name: max(value, 1e-6) for name, value in seconds.items()}


def measured_rates(device: torch.device, seconds: dict[str, float]) -> dict[str, Any]:
    """Fields of the machine file: what this host and its device reach. Sets the number of threads.

    Args:
        seconds: of `collective_seconds`; empty where there is one device.
    """
    on_cpu, rates, sizes = device.type == "cpu", {}, sizes_for(device)
    if on_cpu:
        torch.set_num_threads(1)  # a rank has one core
    for name, dtype in DTYPES.items():
        a = torch.randn(sizes.product, sizes.product, device=device).to(dtype)  # equal elements take less power
        rates[name] = 2 * sizes.product**3 / best_seconds(lambda a=a: a @ a, device)  # type: ignore[misc]
    x, y = torch.ones(sizes.stream, device=device), torch.ones(sizes.stream, device=device)
    stream = 3 * x.nbytes / best_seconds(lambda: x.add_(y), device)  # read twice, written once
    layer = forward_seconds(TransformerBlock(TINY).to(device), TINY, device, 1, 4, 4)
    if on_cpu:  # an accelerator's kernels are as fast as its memory
        stream = min(stream, layer_traffic_rate(device, rates["fp32"], layer))
    return {
        "peak_flops": rates,
        "memory_bandwidth": stream,
        **link_rates(seconds, sizes.large),
        "layer_overhead": layer,
        "tensor_overhead": max(tensor_parallel_seconds(device) - layer, 0.0),
    }


def link_rates(seconds: dict[str, float], large: int) -> dict[str, float]:
    """Of what `collective_seconds` says of collectives of `large` elements; none where there is one device."""
    if not seconds:
        return {}
    links = [
        factor(name, RANKS) * size / max(seconds[f"{name} large"] - seconds[f"{name} small"], 1e-9)
        for name, size in (("all_gather", large * 4 * RANKS), ("all_reduce", large * 4))  # bytes
    ]
    return {"link_bandwidth": sum(links) / len(links), "link_latency": seconds["all_gather small"] / (RANKS - 1)}


def machine_data(device: torch.device, per_host: int, rates: dict[str, Any]) -> dict[str, Any]:
    """The machine file of this host. per_host: its ranks. rates: of `measured_rates`."""
    on_cpu, cores, host = device.type == "cpu", usable_cores(), float(host_memory() or 0)
    memory = host / per_host if on_cpu else float(device_memory(device) or 0)
    data = {
        "name": platform.node() or "here",
        "about": f"{counted(per_host, 'rank')} on {device.type}, measured",
        "device": device.type,
        "hosts": 1,
        "ranks_per_host": per_host,
        "gpu_memory": memory,
        "host_memory": host,
        **rates,
        **dict.fromkeys(EFFICIENCIES, 1.0),
    }
    if on_cpu:
        data |= {"host_memory_bandwidth": rates["memory_bandwidth"] * per_host}
        data |= {"cores": cores, "overlap": 0.0, "memory_reserve": 0.0}
    else:
        data["matmul_efficiency"] = OF_LARGEST_PRODUCT
    source = f"measured by mmm machine --measure on {socket.gethostname()}, torch {torch.__version__}"
    sources = dict.fromkeys((*rates, "ranks_per_host", "gpu_memory", "host_memory", "cores"), source)
    sources |= {name: f"{source}; {RANKS} ranks" for name in ("link_bandwidth", "link_latency") if name in rates}
    sources |= dict.fromkeys(EFFICIENCIES, "the rates are measured")
    if on_cpu:
        sources["overlap"] = "assumed: on a CPU communication and compute share the cores"
    else:
        sources["matmul_efficiency"] = "assumed: of the largest product, the ratio found on A100"
    return {**data, "sources": sources}


def measure_machine(path: Path) -> Machine:
    """Measure this machine and write its file. Raises ConfigError: it cannot be written."""
    threads = torch.get_num_threads()
    if path.is_dir():
        raise ConfigError(f"{path}: that is a folder; name a file for what is measured")
    try:
        ((kind, per_host),) = fork_ranks(devices_here, 1, timeout=PATIENCE)
        seconds: dict[str, float] = {}
        if kind == "cpu" or per_host >= RANKS:  # before this process uses a device
            seconds = fork_ranks(collective_seconds, RANKS, kind, timeout=PATIENCE)[0]
        device = torch.device(kind)
        data = machine_data(device, per_host, measured_rates(device, seconds))
    finally:
        torch.set_num_threads(threads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: what is measured cannot be written: {error.strerror}") from None
    return parse(data, f"machine file {path}", str(path))
