"""A collective of each kind, between two ranks on this host: does it come back, and with the right numbers?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmm_lab.cli.doctor.finding import Finding
from mmm_launch.spec import accelerators
from mmm_verify.ranks import RanksFailed, fork_ranks

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


def check_collectives(outdir: Path, timeout: float, root: Path = Path("/")) -> Iterator[Finding]:
    """Each kind on the CPU, and on two accelerators where there are as many."""
    accelerator = accelerators.find(root, os.environ)
    # Device type → what to do where a collective on it fails.
    fixes = {"cpu": MEET}
    if accelerator.device in ("cuda", "xpu"):
        if accelerator.count > 1:
            fixes[accelerator.device] = NCCL
        else:
            seen = f"not tried on {accelerator.device}: there is one, and two ranks need two"
            yield Finding("collectives", "ok", seen)
    if accelerator.device != "xpu":
        # Ranks that are forked after this import it no more. An Intel GPU's driver would not survive the fork.
        import torch  # noqa: F401
    for device, fix in fixes.items():
        yield from two_ranks(device, timeout, fix)


def two_ranks(device: str, timeout: float, fix: str) -> Iterator[Finding]:
    """Fork two ranks that make one collective of each kind."""
    try:
        first, second = fork_ranks(make_collectives, 2, device, timeout, timeout=timeout)
    except RanksFailed as error:
        yield Finding(f"collectives {device}", "fail", str(error), fix)
        return
    for kind, expected in EXPECTED.items():
        values = [first[kind], second[kind]]
        if values == expected:
            yield Finding(f"{kind} {device}", "ok", "right, 2 ranks")
        else:
            # Wrong numbers without an error are the worst that a network can do.
            seen = f"the ranks have {values}, and should have {expected}"
            yield Finding(f"{kind} {device}", "fail", seen, "do not train here: report it")


def make_collectives(rank: Any, device_type: str, timeout: float) -> dict[str, list[float]]:
    """Make a collective of each kind, on one rank. Returns what the rank has afterwards, by kind."""
    import torch
    import torch.distributed as dist

    from mmm.runtime.process_group import all_gather, process_group, reduce_scatter

    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, rank.rank)
        getattr(torch, device_type).set_device(device)
    # Some are in place, others fill a tensor of another size.
    own = torch.tensor([10.0 * rank.rank, 10.0 * rank.rank + 1], device=device)
    results = {kind: own.clone() for kind in EXPECTED}
    results["all-gather"] = own.new_empty(4)
    results["reduce-scatter"] = own.new_empty(1)
    with process_group(rank, device, timeout):
        dist.all_reduce(results["all-reduce"])
        all_gather(results["all-gather"], own)
        reduce_scatter(results["reduce-scatter"], own)
        dist.all_to_all_single(results["all-to-all"], own)
        dist.broadcast(results["broadcast"], src=0)
        if rank.rank == 0:
            dist.send(own, dst=1)
        else:
            dist.recv(results["send"], src=0)
        # Copying to the host waits for an accelerator.
        return {kind: result.tolist() for kind, result in results.items()}
