"""Bytes that this process's TCP sockets have sent, as the kernel counts them: gloo sends through them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

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
