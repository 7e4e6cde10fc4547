"""What `elastic.py` and `kills.py` have in common: a run's processes, its curve beside another's, and the end."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmm.history import load

# In the environment of all that is started for a run: the name of its folder.
MARK = "MMM_DISTURBED"
SECONDS_TO_GO = 20.0  # after a run's end; then nothing of it may be left
TMPFS = Path("/dev/shm")


def flags(doc: str | None, kills: int) -> argparse.ArgumentParser:
    """A parser of the flags that both programs have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    minutes_help = "no kill after so many; the run ends as told"
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--minutes", type=float, default=float("inf"), help=minutes_help)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="the result, written anew after each kill")
    return parser


def write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result))


class Process(NamedTuple):
    """A process that lives.

    Attributes:
        parent: pid of its parent.
        command: its command line, words divided by zero bytes.
    """

    parent: int
    command: bytes


def processes(outdir: Path) -> dict[int, Process]:
    """All that were started for a run and live, by pid."""
    mark = f"{MARK}={outdir.name}\0".encode()
    living = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            if mark not in (path / "environ").read_bytes():
                continue
            # The name of the program, in brackets, may have blanks.
            after_name = (path / "stat").read_text().rpartition(")")[2]
            state, parent = after_name.split()[:2]
            if state not in ("Z", "X"):
                living[int(path.name)] = Process(int(parent), (path / "cmdline").read_bytes())
        except OSError:
            # It has ended.
            continue
    return living


def left_over(outdir: Path) -> list[str]:
    """What is left of a run that has ended, after the time that it has to go: a sentence each."""
    deadline = time.monotonic() + SECONDS_TO_GO
    living = processes(outdir)
    folders = folders_in_memory()
    while (living or folders) and time.monotonic() < deadline:
        time.sleep(0.05)
        living = processes(outdir)
        folders = folders_in_memory()
    problems = [f"{path} is left after {SECONDS_TO_GO:g} s" for path in folders]
    if living:
        problems.append(f"{len(living)} processes are left after {SECONDS_TO_GO:g} s")
    return problems


def folders_in_memory() -> list[Path]:
    """Folders in memory that no launch holds."""
    folders = []
    for path in TMPFS.glob("mmm-memory-*"):
        try:
            lock = os.open(path, os.O_RDONLY)
        except OSError:
            # Another launch has removed it.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            folders.append(path)
        except OSError:
            # Another launch holds it.
            pass
        finally:
            os.close(lock)
    return folders


def difference(disturbed: Path, undisturbed: Path, bound: float) -> tuple[float, list[str]]:
    """The largest relative difference of a loss between two runs, and what is wrong with it: a sentence each."""
    one = load(disturbed)
    two = load(undisturbed)
    if one["iter"].values.tolist() != two["iter"].values.tolist():
        return float("inf"), [f"the record has {len(one['iter'])} rows, and the run has {len(two['iter'])} steps"]
    losses = two["loss"].values
    largest = float(np.max(np.abs(one["loss"].values - losses) / np.abs(losses)))
    if largest <= bound:
        return largest, []
    return largest, [f"the curves differ by {largest:.1e}"]


def end(result: dict[str, Any], path: Path | None) -> int:
    """Print what is wrong and write the result. Returns the exit code."""
    if result["wrong"]:
        print("\n".join(result["wrong"]))
    else:
        print("nothing was wrong")
    write(path, result)
    return int(bool(result["wrong"]))
