"""Measure this machine: matrix products by dtype, memory, and collectives over ranks of this host.

What is written is a machine file of one host, for ``mmm plan --machine``. Efficiencies in it are 1, because its
rates are what programs reach.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mmm.errors import ConfigError
from mmm.models.transformer import Transformer, TransformerBlock, TransformerConfig, rotary_table
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.tp.tensor_parallel import apply_tensor_parallel
from mmm.plan.machine import read
from mmm.plan.memory import MemoryModel
from mmm.plan.models import transformer_spec
from mmm.runtime.device import is_available
from mmm.runtime.memory import device_memory, host_memory
from mmm.runtime.process_group import all_gather
from mmm.torch_private.dry_run import register_fake_group
from mmm.traffic.collective_bytes import factor

TRIES = 12
PRODUCT = 768  # of the square matrices
STREAM = 1 << 24  # elements
SMALL, LARGE = 1 << 8, 1 << 19  # elements of a collective, for its latency and for its bandwidth
BETWEEN, PRODUCTS = 384, 3  # size and number of the products between two collectives
ROUNDS = 8  # of products and a collective, whose mean is one try
LAYER: dict[str, Any] = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 64, "vocab_size": 64}
USUAL: dict[str, Any] = {"dim": 256, "n_layers": 1, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 704, "vocab_size": 64}
TOKENS = 4, 256  # batch and sequence of it
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def best_seconds(
    work: Callable[[], Any], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Of some tries, after one that does not count.

    Args:
        clock: `time.thread_time` for what one thread of a CPU computes: other work on the host is then not in it.
    """
    best = float("inf")
    for attempt in range(TRIES + 1):
        begin = clock()
        work()
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()
        if attempt:
            best = min(best, clock() - begin)
    return best


def computing(device: torch.device) -> Callable[[], float]:
    """The clock for what this thread computes."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def product_rates(device: torch.device) -> dict[str, float]:
    """FLOP/s of a product of square matrices, by dtype."""
    rates = {}
    for name, dtype in DTYPES.items():
        a = torch.ones(PRODUCT, PRODUCT, device=device, dtype=dtype)
        rates[name] = 2 * PRODUCT**3 / best_seconds(lambda a=a: a @ a, device, computing(device))  # type: ignore[misc]
    return rates


def stream_rate(device: torch.device) -> float:
    """Bytes/s that an addition in place of two tensors reads and writes."""
    a, b = torch.ones(STREAM, device=device), torch.ones(STREAM, device=device)
    return 3 * a.nbytes / best_seconds(lambda: a.add_(b), device, computing(device))


def layer_seconds(device: torch.device, sizes: dict[str, Any], batch: int, seq: int) -> float:
    """Of the forward of a layer."""
    config = TransformerConfig(**sizes)
    return _forward_seconds(TransformerBlock(config).to(device), config, device, batch, seq)


def _forward_seconds(
    layer: nn.Module, config: TransformerConfig, device: torch.device, batch: int, seq: int, tp: int = 1
) -> float:
    x = torch.zeros(batch, seq // tp, config.dim, device=device)
    cos, sin = rotary_table(torch.arange(seq, device=device), config.head_dim, config.rope_theta)
    return best_seconds(lambda: layer(x, cos, sin), device, computing(device))


def layer_traffic_rate(device: torch.device, product_rate: float, overhead: float) -> float:
    """Bytes/s at which a layer's element-wise kernels and attention go through memory: what is left of the seconds of
    its forward after its products, over the bytes that `CostModel` counts for them."""
    batch, seq = TOKENS
    spec = transformer_spec(TransformerConfig(**USUAL), seq)
    kind = next(kind for kind in spec.kinds if kind.role == "layer")
    traffic = batch * seq * MemoryModel(spec, device.type, "fp32").kept(1, False).traffic
    products = batch * (kind.flops - kind.attention_flops / 2) / product_rate
    left = layer_seconds(device, USUAL, batch, seq) - products - overhead
    return traffic / left if left > 0 else float("inf")


def _measure_collectives(rank: int, ranks: int, store: str, result: str) -> None:
    """On each rank of a group over gloo: seconds that small and large collectives add to the products between them.

    Rank 0 writes them.

    As in a step: a rank that computes comes late, one that waits has to be woken, and what a collective copies is no
    longer in the cache.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    a = torch.ones(BETWEEN, BETWEEN)

    def rounds(call: Callable[[], Any]) -> float:
        def work() -> None:
            for _ in range(ROUNDS):
                for _ in range(PRODUCTS):
                    a @ a
                call()

        return best_seconds(work, torch.device("cpu")) / ROUNDS

    found, alone = {}, rounds(lambda: None)
    for count, name in ((SMALL, "small"), (LARGE, "large")):
        part = torch.ones(count)
        full = torch.empty(count * ranks)
        summed = torch.ones(count)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda full=full, part=part: all_gather(full, part),  # type: ignore[misc]
            "all_reduce": lambda summed=summed: dist.all_reduce(summed),  # type: ignore[misc]
        }
        for operation, call in calls.items():
            dist.barrier()
            found[f"{operation} {name}"] = max(rounds(call) - alone, 1e-6)
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


def _measure_tensor_parallel(rank: int, device: str, result: str) -> None:
    """Seconds of the forward of a small layer that is sharded over tp, in a process of its own: the other ranks of its
    group are not there, so that what it takes is this host's part alone."""
    torch.set_num_threads(1)
    register_fake_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=2)
    config = TransformerConfig(**LAYER)
    model = Transformer(config).to(device)
    apply_tensor_parallel(model, init_device_mesh(device, (2,)), transformer_plan())
    seconds = _forward_seconds(model.layers["0"], config, torch.device(device), 1, 4, 2)
    Path(result).write_text(str(seconds))


def tensor_parallel_seconds(device: str) -> float:
    """Of the forward of the layer that `layer_seconds` measures for its overhead, sharded over tp."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        mp.spawn(_measure_tensor_parallel, (device, str(result)))
        return float(result.read_text())


def collective_rates(ranks: int) -> tuple[float, float, dict[str, float]]:
    """Seconds of a message, and bytes/s of a rank, of collectives over gloo on this host; and what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        mp.spawn(_measure_collectives, (ranks, f"{folder}/store", str(result)), nprocs=ranks)
        found: dict[str, float] = json.loads(result.read_text())
    latency = found["all_gather small"] / (ranks - 1)
    moved = {"all_gather": LARGE * 4 * ranks, "all_reduce": LARGE * 4}
    rates = [
        factor(operation, ranks) * size / max(found[f"{operation} large"] - found[f"{operation} small"], 1e-9)
        for operation, size in moved.items()
    ]
    return latency, sum(rates) / len(rates), found


@dataclass(frozen=True)
class Rates:
    """What this machine reaches.

    Attributes:
        products: FLOP/s of matrix products, by dtype. stream: bytes/s of memory.
        layer, tensor_parallel: seconds that a layer takes at least, and that tp adds to it.
        latency, bandwidth: of collectives: seconds of a message, bytes/s of a rank.
        collectives: seconds of each that was measured.
    """

    products: dict[str, float]
    stream: float
    layer: float
    tensor_parallel: float
    latency: float
    bandwidth: float
    collectives: dict[str, float]


def measure(device: torch.device, ranks: int) -> Rates:
    """The rates of a device, and of collectives over so many ranks of this host."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)  # a rank has one core
    try:
        products, stream, layer = product_rates(device), stream_rate(device), layer_seconds(device, LAYER, 1, 4)
        if device.type == "cpu":  # an accelerator's kernels are as fast as its memory
            stream = min(stream, layer_traffic_rate(device, products["fp32"], layer))
    finally:
        torch.set_num_threads(threads)
    tensor_parallel = max(tensor_parallel_seconds(device.type) - layer, 0.0)
    return Rates(products, stream, layer, tensor_parallel, *collective_rates(ranks))


def machine_data(device: torch.device, rates: Rates, ranks: int) -> dict[str, Any]:
    """The machine file of this host. ranks: that the collectives were measured with."""
    on_cpu, cores = device.type == "cpu", os.cpu_count() or 1
    accelerators = 0 if on_cpu else getattr(torch, device.type).device_count()
    per_host = accelerators or min(max(cores, 1), 4)
    host = host_memory() or 0
    source = f"measured by mmm plan --calibrate on {socket.gethostname()}, torch {torch.__version__}"
    return {
        "name": f"{platform.node() or 'here'}",
        "about": f"{per_host} ranks on {device.type}, measured",
        "device": device.type,
        "hosts": 1,
        "gpus_per_host": per_host,
        "gpu_memory": host / per_host if on_cpu else float(device_memory(device) or 0),
        "host_memory": float(host),
        "peak_flops": rates.products,
        "memory_bandwidth": rates.stream,
        "host_memory_bandwidth": rates.stream * per_host,
        "link_bandwidth": rates.bandwidth,
        "link_latency": rates.latency,
        "layer_overhead": rates.layer,
        "tensor_overhead": rates.tensor_parallel,
        **dict.fromkeys(("matmul_efficiency", "memory_efficiency", "link_efficiency", "network_efficiency"), 1.0),
        "cores": cores if on_cpu else 0,
        "overlap": 0.0 if on_cpu else 0.9,
        "memory_reserve": 0.0 if on_cpu else 0.08,
        "sources": {
            **dict.fromkeys(("peak_flops", "gpu_memory", "host_memory", "cores"), source),
            **dict.fromkeys(("layer_overhead", "tensor_overhead"), source),
            "memory_bandwidth": source + ("; element-wise kernels and attention of a layer" if on_cpu else ""),
            **dict.fromkeys(("link_bandwidth", "link_latency"), f"{source}; gloo, {ranks} ranks"),
            **dict.fromkeys(("matmul_efficiency", "memory_efficiency", "link_efficiency"), "the rates are measured"),
            "overlap": "assumed: on a CPU communication and compute share the cores",
        },
    }


def calibrate(path: Path, say: Callable[[str], Any], ranks: int = 2) -> int:
    """Measure, write the machine file, and say what was found. Returns 0.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path.exists() and path.is_dir():
        raise ConfigError(f"--calibrate {path}: that is a folder; name a file")
    device = torch.device(next((kind for kind in ("cuda", "xpu") if is_available(kind)), "cpu"))
    rates = measure(device, ranks)
    data = machine_data(device, rates, ranks)
    read(data, "calibration")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--calibrate {path}: it cannot be written: {error.strerror}") from None
    for name, rate in rates.products.items():
        say(f"{'product ' + name:<22} {rate / 1e9:12.2f} GFLOP/s")
    say(f"{'memory':<22} {rates.stream / 1e9:12.2f} GB/s")
    say(f"{'a layer at least':<22} {rates.layer * 1e6:12.1f} µs")
    say(f"{'sharded over tp':<22} {rates.tensor_parallel * 1e6:12.1f} µs more")
    for name, seconds in rates.collectives.items():
        say(f"{name:<22} {seconds * 1e6:12.1f} µs")
    say(f"{'collectives':<22} {rates.bandwidth / 1e9:12.2f} GB/s a rank, {rates.latency * 1e6:.1f} µs a message")
    say(f"written: {path}; mmm plan --machine {path} reads it")
    return 0
