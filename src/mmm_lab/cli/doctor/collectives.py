"""A collective of each kind, between two ranks on this host: does it come back, and with the right numbers?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from mmm_lab.cli.doctor.finding import Finding, Place
from mmm_lab.cli.doctor.isolated import isolated
from mmm_launch.spec import accelerators
from mmm_verify.ranks import fork_ranks

MEET = "two ranks on this host cannot meet: try export GLOO_SOCKET_IFNAME=lo; is 127.0.0.1 up (ip link set lo up)?"
NCCL = "see what NCCL_DEBUG=INFO says; only on the CPU: --device cpu"
# What each of two ranks has afterwards, where rank r begins with 10 r and 10 r + 1.
EXPECTED: dict[str, list[list[float]]] = {
    "all-reduce": [[10, 12], [10, 12]],
    "all-gather": [[0, 1, 10, 11], [0, 1, 10, 11]],
    "reduce-scatter": [[10], [12]],
    "all-to-all": [[0, 10], [1, 11]],
    "broadcast": [[0, 1], [0, 1]],
    "send": [[0, 1], [0, 1]],
}


def check_collectives(place: Place) -> Iterator[Finding]:
    """Each kind on the CPU, and on two accelerators where there are as many."""
    accelerator = accelerators.find(place.root, place.environ)
    # Device type → what to do where a collective on it fails.
    fixes = {"cpu": MEET}
    if accelerator.device in ("cuda", "xpu"):
        if accelerator.count > 1:
            fixes[accelerator.device] = NCCL
        else:
            seen = f"not tried on {accelerator.device}: there is one, and two ranks need two"
            yield Finding("collectives", "ok", seen)
    for device, fix in fixes.items():
        for kind in EXPECTED:
            # Each in a process of its own: one that hangs leaves the others.
            check = partial(two_ranks, kind, device, place.timeout)
            yield from isolated(f"{kind} {device}", check, place.timeout, fix)


def two_ranks(kind: str, device: str, timeout: float) -> Iterator[Finding]:
    """Fork two ranks that make one collective."""
    results = fork_ranks(make_collective, 2, kind, device, timeout, timeout=timeout)
    backend, _ = results[0]
    values = [values_of_rank for _, values_of_rank in results]
    if values == EXPECTED[kind]:
        yield Finding(f"{kind} {device}", "ok", f"{backend}: right, 2 ranks")
    else:
        # Wrong numbers without an error are the worst that a network can do.
        expected = EXPECTED[kind]
        seen = f"{backend}: the ranks have {values}, and should have {expected}"
        yield Finding(f"{kind} {device}", "fail", seen, "do not train here: report it")


def make_collective(rank: Any, kind: str, device_type: str, timeout: float) -> tuple[str, list[float]]:
    """Make one collective, on one rank. Returns the backend, and what the rank has afterwards."""
    import torch
    import torch.distributed as dist

    from mmm.runtime.device import backend_for
    from mmm.runtime.process_group import all_gather, process_group, reduce_scatter

    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, rank.rank)
        getattr(torch, device_type).set_device(device)
    own = torch.tensor([10.0 * rank.rank, 10.0 * rank.rank + 1], device=device)
    with process_group(rank, device, timeout):
        # Some are in place, others fill a tensor of another size. Both ranks take part in each.
        result = own
        if kind == "all-reduce":
            dist.all_reduce(own)
        elif kind == "all-gather":
            result = own.new_empty(4)
            all_gather(result, own)
        elif kind == "reduce-scatter":
            result = own.new_empty(1)
            reduce_scatter(result, own)
        elif kind == "all-to-all":
            result = own.new_empty(2)
            dist.all_to_all_single(result, own)
        elif kind == "broadcast":
            dist.broadcast(own, src=0)
        elif rank.rank == 0:
            dist.send(own, dst=1)
        else:
            dist.recv(own, src=0)
        return backend_for(device), result.tolist()
