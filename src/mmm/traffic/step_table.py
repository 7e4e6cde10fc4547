"""The bytes of one step: counted, beside those of the formula, and what the kernel says; as a table."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from mmm.parallel.mesh import Mesh
from mmm.traffic.count import Traffic, count_traffic

BYTES_SENT = 200  # offset in struct tcp_info (linux/tcp.h, since 4.19): __u64 tcpi_bytes_sent, tcpi_bytes_retrans


def socket_bytes() -> dict[str, int]:
    """Payload bytes sent by each TCP socket that is open here; what was sent again counts once. Linux only.

    Raises:
        OSError: no Linux, or one before 4.19, which does not count them.
    """
    by_socket = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except FileNotFoundError:
            continue  # closed since the list was made
        if len(info) < BYTES_SENT + 16:
            raise OSError("this kernel does not count what a TCP socket sends (Linux does since 4.19)")
        sent, again = struct.unpack_from("QQ", info, BYTES_SENT)
        by_socket[name] = sent - again
    return by_socket


def sent_since(before: Mapping[str, int]) -> int:
    """Bytes sent since `before` (of `socket_bytes`) by the sockets that are open now: one that has been closed in
    between, such as those of a group that is no longer needed, takes nothing away."""
    return sum(sent - before.get(name, 0) for name, sent in socket_bytes().items())


class Sent(NamedTuple):
    """One rank's step: bytes by axis, counted and expected; by gloo; by the sockets (0 where gloo moves nothing)."""

    counted: dict[str, int]
    formula: dict[str, float]
    gloo: int
    sockets: int


def count_step(step: Callable[[], object], mesh: Mesh, formula: dict[str, float]) -> tuple[list[Sent], Traffic]:
    """Call `step` and count what it sends. A collective.

    Returns:
        By rank; and of this one call by call.
    """
    by_gloo = mesh.device_mesh.device_type == "cpu" and sys.platform == "linux"
    dist.barrier()
    before = socket_bytes() if by_gloo else {}
    with count_traffic(mesh) as traffic:
        step()
    with count_traffic() as end:
        dist.barrier()  # nothing is on its way after it; it has sent something itself
    sockets = sent_since(before) - end.wire if by_gloo else 0
    everyone: list[Sent] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(everyone, Sent(traffic.by_axis, formula, traffic.wire, sockets))
    return everyone, traffic


def max_rel_diff(sent: Sent) -> float:
    """The largest relative difference of counted and formula over the axes."""
    axes = {axis for side in (sent.counted, sent.formula) for axis, count in side.items() if count}
    pairs = [(sent.counted.get(axis, 0), sent.formula.get(axis, 0.0)) for axis in axes]
    return max((abs(counted / formula - 1) if formula else float("inf") for counted, formula in pairs), default=0.0)


def table(by_case: Mapping[tuple[str, str], Sequence[Sent]]) -> str:
    """A line a layout and axis, of the rank that sends most; gloo and sockets for all axes, on the first line.

    Args:
        by_case: by name and layout, what each rank sent.
    """
    lines = [f"{'':18}{'layout':<24}{'axis':<13}{'counted':>12}{'formula':>12}{'differ':>8}{'gloo':>12}{'sockets':>12}"]
    for (name, layout), by_rank in by_case.items():
        most = max(by_rank, key=lambda sent: sum(sent.counted.values()))
        head = f"{name:18}{layout:<24}"
        wire = f"{most.gloo:12,}{most.sockets:12,}"
        for axis, formula in most.formula.items():
            counted = most.counted.get(axis, 0)
            lines.append(f"{head}{axis:<13}{counted:12,}{formula:12,.0f}{counted / formula - 1:8.2%}{wire}")
            head, wire = " " * 42, ""
    return "\n".join(lines)
