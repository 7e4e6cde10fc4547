"""Where each rank of a run that hangs is, and which of them are not where the others wait.

The ranks write their stacks themselves: py-spy needs the right to trace them, which compute nodes seldom give.
"""

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

STACK_FILE = "mmm-stack"  # a rank's memory file, into which its SIGQUIT handler writes its Python stack
RUNNER = "/mmm_launch/host/child.py"  # from here on outwards it is launch's own part
PATIENCE = 0.5  # s for the handlers to write
SHOWN = 6  # frames of a stack
WAITING = ("/torch/distributed/", "/torch/nn/parallel/")  # a frame in these files waits for other ranks

Stack = tuple[str, ...]  # frames, the innermost first: 'File "train.py", line 3 in step'


def ask(pids: Mapping[int, int]) -> dict[int, Stack]:
    """The Python stacks of these ranks (rank → pid on this host). A rank that cannot say is left out."""
    files = {rank: file for rank, pid in pids.items() if (file := _file(pid)) is not None}
    for rank in files:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pids[rank], signal.SIGQUIT)
    found: dict[int, Stack] = {}
    deadline = time.monotonic() + PATIENCE
    while len(found) < len(files) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, file in files.items():
            with contextlib.suppress(OSError):
                if stack := read(file.read_text(errors="replace")):
                    found[rank] = stack
    return found


def read(text: str) -> Stack:
    """The frames in what `faulthandler` writes; of the last stack, if there are several."""
    last = text.rpartition("(most recent call first):\n")[2]
    frames = [line.strip() for line in last.splitlines() if line.startswith("  File ")]
    return tuple(itertools.takewhile(lambda frame: RUNNER not in frame, frames))


def explain(stacks: Mapping[int, Stack], hosts: Mapping[int, str]) -> str:
    """In words which ranks are not where the others are; "" if no rank could say where it is.

    The others are those that wait inside torch.distributed, if some do and some do not; else the largest group of ranks
    that are at the same place.
    """
    if not stacks:
        return ""
    waiting = {rank for rank, stack in stacks.items() if any(part in frame for frame in stack for part in WAITING)}
    places: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(_place(stack), []).append(rank)
    if len(places) == 1:
        return f"launch: all {len(stacks)} ranks are at the same place:\n{_shown(next(iter(stacks.values())))}"
    others = waiting if waiting and len(waiting) < len(stacks) else set(sorted(places.values(), key=len)[-1])
    odd = [rank for rank in sorted(stacks) if rank not in others]
    lines = []
    for ranks in [found for group in places.values() if (found := [rank for rank in group if rank in odd])]:
        named = ", ".join(f"rank {rank} on {hosts.get(rank, '?')}" for rank in ranks[:8]) + (" …" if ranks[8:] else "")
        lines.append(
            f"launch: {named} {'is' if len(ranks) == 1 else 'are'} not where the others are, but at:\n"
            f"{_shown(stacks[ranks[0]])}"
        )
    example = min(others)
    lines.append(
        f"launch: the other {len(others)}, such as rank {example} on {hosts.get(example, '?')}, are at:\n"
        f"{_shown(stacks[example])}"
    )
    return "\n".join(lines)


def _place(stack: Stack) -> str:
    """The innermost line outside of torch: lines inside of it differ by moments."""
    own = [frame for frame in stack if "/torch/" not in frame and not re.search(r"/python3[^/]*/[^/]+\.py", frame)]
    return (own or list(stack) or [""])[0]


def _shown(stack: Stack) -> str:
    rest = len(stack) - SHOWN
    return "\n".join([f"  {frame}" for frame in stack[:SHOWN]] + ([f"  … and {rest} more"] if rest > 0 else []))


def _file(pid: int) -> Path | None:
    folder = Path("/proc") / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if f"memfd:{STACK_FILE}" in os.readlink(folder / name):
                    return folder / name
    return None
