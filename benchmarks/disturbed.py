"""What `elastic.py` and `kills.py` have in common: a run's processes, its curve beside another's, and the end."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmm.history import load

MARK = "MMM_DISTURBED"  # in the environment of all that is started for a run: its folder's name
GONE = 20.0  # s within which nothing is left of a run
TMPFS = Path("/dev/shm")


def flags(doc: str | None, kills: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="no kill after so many; the run ends as told"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="what was found, written anew after each kill")
    return parser


def write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result))


def processes(outdir: Path) -> dict[int, tuple[int, bytes]]:
    """All that were started for a run: pid → parent and command line."""
    mark, found = f"{MARK}={outdir.name}\0".encode(), {}
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and mark in (path / "environ").read_bytes():
                state, parent, *_ = (path / "stat").read_text().rpartition(")")[2].split()
                if state not in "ZX":
                    found[int(path.name)] = int(parent), (path / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
    return found


def left_over(outdir: Path) -> list[str]:
    """What is left of a run that has ended, after the time that it has to go."""
    deadline = time.monotonic() + GONE
    while ((left := processes(outdir)) or in_memory()) and time.monotonic() < deadline:
        time.sleep(0.05)
    said = [f"{len(left)} processes are left after {GONE:g} s"] if left else []
    return said + [f"{path} is left after {GONE:g} s" for path in in_memory()]


def in_memory() -> list[Path]:
    """Folders in memory that no launch holds."""
    found = []
    for path in TMPFS.glob("mmm-memory-*"):
        with contextlib.suppress(OSError):  # another launch holds it, or has removed it
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                found.append(path)
            finally:
                os.close(lock)
    return found


def difference(found: Path, whole: Path, most: float) -> tuple[float, list[str]]:
    """How far the losses of two runs are from each other, relatively, and what is wrong with that."""
    one, two = load(found), load(whole)
    if one["iter"].values.tolist() != two["iter"].values.tolist():
        return float("inf"), [f"the record has {len(one['iter'])} rows, and the run has {len(two['iter'])} steps"]
    losses = two["loss"].values
    far = float(np.max(np.abs(one["loss"].values - losses) / np.abs(losses)))
    return far, [f"the curves differ by {far:.1e}"] if not far <= most else []


def end(result: dict[str, Any], path: Path | None) -> int:
    """Say what is wrong, write the result; the exit code."""
    print("\n".join(result["wrong"]) if result["wrong"] else "nothing was wrong")
    write(path, result)
    return int(bool(result["wrong"]))
