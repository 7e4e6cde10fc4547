"""``mmm machine --measure``: measures products, memory, layers and collectives, and writes a machine file of one host.

Measured rates are what programs reach, so that their efficiencies are 1. On a CPU, compute is that of one thread.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mmm.errors import ConfigError
from mmm.history.record.folder import write_atomically
from mmm.models.llama.model import Transformer, TransformerBlock, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.nn.rope import rotary_table
from mmm.parallel.collective_bytes import factor
from mmm.parallel.tp.tensor_parallel import apply_tensor_parallel
from mmm.runtime.device import choose_device, is_available, synchronize
from mmm.runtime.memory import device_memory, host_memory
from mmm.runtime.process_group import all_gather, process_group
from mmm.runtime.ranks import Rank
from mmm.torch_private.dry_run import register_fake_group
from mmm.units import counted
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.models import model_spec
from mmm_launch.contract import usable_cores
from mmm_launch.machines.machine import Machine, parse
from mmm_verify.ranks import fork_ranks

TRIES = 12
RANKS = 2  # that collectives are measured on
PATIENCE = 600.0  # s that the collectives may take
SMALL = 1 << 8  # elements of a collective, to measure its latency
# One try of a collective: ROUNDS times, PRODUCTS products of square matrices with BETWEEN rows, then the collective.
BETWEEN = 384
PRODUCTS = 3
ROUNDS = 8
TINY = TransformerConfig(
    dim=32,
    n_layers=1,
    n_heads=4,
    n_kv_heads=4,
    ffn_dim=64,
    vocab_size=64,
)
USUAL = TransformerConfig(
    dim=256,
    n_layers=1,
    n_heads=8,
    n_kv_heads=8,
    ffn_dim=704,
    vocab_size=64,
)
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
}
# The products of a model reach this fraction of the largest product's rate on an accelerator. It was found on A100, and
# is right on an H200 (docs/plan-measured.md).
OF_LARGEST_PRODUCT = 0.75
EFFICIENCIES = ("matmul_efficiency", "memory_efficiency", "link_efficiency", "network_efficiency")


class Sizes(NamedTuple):
    """Sizes of what is measured. They are large enough to keep the device busy, so that the host is not what is timed.

    Attributes:
        product: rows of the square matrices that are multiplied.
        stream: elements of the tensors that are added.
        large: elements of a collective, to measure its bandwidth.
    """

    product: int
    stream: int
    large: int


ON_CPU = Sizes(product=768, stream=1 << 24, large=1 << 19)
ON_ACCELERATOR = Sizes(product=8192, stream=1 << 28, large=1 << 26)


def sizes_for(device: torch.device) -> Sizes:
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def devices_here(rank: Rank) -> tuple[str, int]:
    """The type and number of this host's devices.

    Call it in a forked process: ranks that are forked from a process which has looked for devices cannot use them.
    """
    for kind in ("cuda", "xpu"):
        if is_available(kind):
            return kind, getattr(torch, kind).device_count()
    return "cpu", min(usable_cores(), 4)


def best_seconds(work: Callable[[], Any], device: torch.device, waits: bool = False) -> float:
    """Seconds of the fastest of some tries. The first try includes warm-up, and does not count.

    On a CPU only the time in which this thread computes counts, so that other work on the host does not matter.

    Args:
        waits: whether `work` waits for other ranks; then all time counts.
    """
    clock = time.thread_time if device.type == "cpu" and not waits else time.perf_counter
    seconds = []
    for _ in range(TRIES + 1):
        begin = clock()
        work()
        synchronize(device)
        seconds.append(clock() - begin)
    return min(seconds[1:])


def forward_seconds(layer: nn.Module, config: TransformerConfig, device: torch.device, *sizes: int) -> float:
    """Seconds of the forward of a layer.

    Args:
        sizes: number of samples, of tokens in each, and of the tokens that this rank has.
    """
    batch, seq, positions = sizes
    x = torch.zeros(batch, positions, config.dim, device=device)
    cos, sin = rotary_table(torch.arange(seq, device=device), config.head_dim, config.rope_theta)
    return best_seconds(lambda: layer(x, cos, sin), device)


def layer_traffic_rate(device: torch.device, product_rate: float, overhead: float) -> float:
    """Bytes/s at which the element-wise kernels and the attention of a layer read and write memory.

    These are the bytes that `CostModel` counts for them, over the seconds of the layer's forward less those of its
    matrix products.

    Args:
        product_rate: FLOP/s of a large product.
        overhead: seconds in which the host starts the kernels.
    """
    batch = 4
    seq = 256
    spec = model_spec(USUAL, seq)
    # All layers are alike.
    kind = next(kind for kind in spec.kinds if kind.role == "layer")
    traffic = batch * seq * MemoryModel(spec, device.type, "fp32").kept(1, False).traffic
    products = batch * (kind.flops - kind.attention_flops / 2) / product_rate
    seconds = forward_seconds(
        TransformerBlock(USUAL).to(device),
        USUAL,
        device,
        batch,
        seq,
        seq,
    )
    return traffic / max(seconds - products - overhead, 1e-12)


def tensor_parallel_seconds(device: torch.device) -> float:
    """Seconds of the forward of a tiny layer that is sharded over tp.

    There is no other rank, so that what is timed is the work of the host.
    """
    register_fake_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        model = Transformer(TINY).to(device)
        apply_tensor_parallel(model, init_device_mesh(device.type, (2,)), transformer_plan())
        return forward_seconds(model.layers["0"], TINY, device, 1, 4, 2)
    finally:
        dist.destroy_process_group()


def collective_seconds(rank: Rank, kind: str) -> dict[str, float]:
    """Seconds that collectives add to the products between them. Each rank of a group calls this.

    Products between collectives make it like a step: some ranks arrive late, a rank that waits has to be woken, and
    what a collective copies is no longer in the cache.

    Args:
        kind: type of the ranks' devices.
    """
    device = choose_device(kind, rank)
    a = torch.ones(BETWEEN, BETWEEN, device=device)

    def seconds_of(call: Callable[[], Any]) -> float:
        def work() -> None:
            for _ in range(ROUNDS):
                for _ in range(PRODUCTS):
                    a @ a
                call()

        return best_seconds(work, device, waits=True) / ROUNDS

    seconds: dict[str, float] = {}
    with process_group(rank, device, PATIENCE):
        products = seconds_of(lambda: None)
        for count, name in ((SMALL, "small"), (sizes_for(device).large, "large")):
            shard = torch.ones(count, device=device)
            summed = torch.ones(count, device=device)
            full = torch.empty(count * rank.world_size, device=device)
            # The ranks begin together.
            dist.barrier()
            gathered = seconds_of(lambda full=full, shard=shard: all_gather(full, shard))  # type: ignore[misc]
            dist.barrier()
            reduced = seconds_of(lambda summed=summed: dist.all_reduce(summed))  # type: ignore[misc]
            seconds |= {f"all_gather {name}": gathered - products, f"all_reduce {name}": reduced - products}
    return {name: max(value, 1e-6) for name, value in seconds.items()}


def measured_rates(device: torch.device, seconds: dict[str, float]) -> dict[str, Any]:
    """Fields of the machine file: what this host and its device reach. It sets the number of threads.

    Args:
        seconds: what `collective_seconds` returns; empty if there is one device.
    """
    on_cpu = device.type == "cpu"
    sizes = sizes_for(device)
    if on_cpu:
        # A rank has one core.
        torch.set_num_threads(1)
    rates = {}
    for name, dtype in DTYPES.items():
        # Random elements: equal ones take less power, and an accelerator would run faster than with real ones.
        a = torch.randn(sizes.product, sizes.product, device=device).to(dtype)
        rates[name] = 2 * sizes.product**3 / best_seconds(lambda a=a: a @ a, device)  # type: ignore[misc]
    x = torch.ones(sizes.stream, device=device)
    y = torch.ones(sizes.stream, device=device)
    # Two tensors are read, and one is written.
    stream = 3 * x.nbytes / best_seconds(lambda: x.add_(y), device)
    layer = forward_seconds(TransformerBlock(TINY).to(device), TINY, device, 1, 4, 4)
    if on_cpu:
        # On an accelerator these kernels are as fast as its memory.
        stream = min(stream, layer_traffic_rate(device, rates["fp32"], layer))
    return {
        "peak_flops": rates,
        "memory_bandwidth": stream,
        **link_rates(seconds, sizes.large),
        "layer_overhead": layer,
        "tensor_overhead": max(tensor_parallel_seconds(device) - layer, 0.0),
    }


def link_rates(seconds: dict[str, float], large: int) -> dict[str, float]:
    """Bandwidth and latency of the links between devices; none if there is one device.

    Args:
        seconds: what `collective_seconds` returns.
        large: number of elements of its large collectives.
    """
    if not seconds:
        return {}
    bandwidths = []
    # The full buffer of an all-gather has the elements of all ranks, 4 bytes each.
    for name, size in (("all_gather", large * 4 * RANKS), ("all_reduce", large * 4)):
        # The difference to a small collective leaves out the latency.
        transfer = max(seconds[f"{name} large"] - seconds[f"{name} small"], 1e-9)
        bandwidths.append(factor(name, RANKS) * size / transfer)
    return {
        "link_bandwidth": sum(bandwidths) / len(bandwidths),
        "link_latency": seconds["all_gather small"] / (RANKS - 1),
    }


def machine_data(device: torch.device, per_host: int, rates: dict[str, Any]) -> dict[str, Any]:
    """The contents of this host's machine file.

    Args:
        per_host: number of ranks on the host.
        rates: what `measured_rates` returns.
    """
    on_cpu = device.type == "cpu"
    host = float(host_memory())
    source = f"measured by mmm machine --measure on {socket.gethostname()}, torch {torch.__version__}"
    data = {
        "name": platform.node() or "here",
        "about": f"{counted(per_host, 'rank')} on {device.type}, measured",
        "device": device.type,
        "hosts": 1,
        "ranks_per_host": per_host,
        "gpu_memory": host / per_host if on_cpu else float(device_memory(device) or 0),
        "host_memory": host,
        **rates,
        **dict.fromkeys(EFFICIENCIES, 1.0),
    }
    sources = dict.fromkeys((*rates, "ranks_per_host", "gpu_memory", "host_memory", "cores"), source)
    sources |= dict.fromkeys(EFFICIENCIES, "the rates are measured")
    if on_cpu:
        data["host_memory_bandwidth"] = rates["memory_bandwidth"] * per_host
        data |= {
            "cores": usable_cores(),
            "overlap": 0.0,
            "memory_reserve": 0.0,
        }
        sources["overlap"] = "assumed: on a CPU communication and compute share the cores"
    else:
        data["matmul_efficiency"] = OF_LARGEST_PRODUCT
        sources["matmul_efficiency"] = "assumed: of the largest product, the ratio found on A100"
    return {**data, "sources": sources}


def measure_machine(path: Path) -> Machine:
    """Measure this machine and write its file.

    Raises:
        ConfigError: no file can be written there.
        RecordError: the disk became full meanwhile.
    """
    threads = torch.get_num_threads()
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file for what is measured")
    try:
        # Before the minutes that measuring takes.
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: no file can be written there: {error.strerror}") from None
    try:
        ((kind, per_host),) = fork_ranks(devices_here, 1, timeout=PATIENCE)
        seconds: dict[str, float] = {}
        if kind == "cpu" or per_host >= RANKS:
            # Ranks are forked before this process uses a device.
            seconds = fork_ranks(collective_seconds, RANKS, kind, timeout=PATIENCE)[0]
        device = torch.device(kind)
        data = machine_data(device, per_host, measured_rates(device, seconds))
    finally:
        # The caller's number of threads, which `measured_rates` changes.
        torch.set_num_threads(threads)
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode())
    return parse(data, f"machine file {path}", str(path))
