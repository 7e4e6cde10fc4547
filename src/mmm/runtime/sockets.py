"""Bytes that this process's TCP sockets have sent, as the kernel counts them: gloo sends through them."""

from __future__ import annotations

import os
import socket
import struct

BYTES_SENT = 200  # offset in struct tcp_info (linux/tcp.h, since 4.19): __u64 tcpi_bytes_sent, tcpi_bytes_retrans


def socket_bytes() -> int:
    """Payload bytes sent by all TCP sockets that are open here; what was sent again counts once. Linux only.

    Raises:
        OSError: no Linux, or one before 4.19, which does not count them.
    """
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except FileNotFoundError:
            continue  # closed since the list was made
        if len(info) < BYTES_SENT + 16:
            raise OSError("this kernel does not count what a TCP socket sends (Linux does since 4.19)")
        sent, again = struct.unpack_from("QQ", info, BYTES_SENT)
        total += sent - again
    return total
