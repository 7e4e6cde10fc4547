"""What the log and the record say of a run besides its rows."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from mmm import history
from mmm.history.record.attempts import this_attempt
from mmm.run import config_file
from mmm.run.rows import Totals
from mmm.runtime.device import collective_library, devices_in_use
from mmm.runtime.ranks import command_line
from mmm.runtime.startup import started
from mmm.units import counted
from mmm_launch.contract import LINE_VARIABLE, SITE_VARIABLE

if TYPE_CHECKING:
    from mmm.run.run import Run


def keep_earlier_facts(run: Run, config: Mapping[str, Any]) -> None:
    """Keep the notes and the sampled texts of the part of a run before it was resumed.

    Args:
        config: config.json as that part has left it. Anybody may have edited it.
    """
    notes = config.get("notes")
    if isinstance(notes, list):
        own = run.facts["notes"]
        # Each attempt makes some of the same notes.
        earlier_notes = [note for note in notes if note not in own]
        run.facts["notes"] = earlier_notes + own
    samples = config.get("samples")
    if isinstance(samples, list):
        earlier = []
        for sample in samples:
            step = sample.get("iter") if isinstance(sample, dict) else None
            # Steps after the checkpoint are made again, and sampled again.
            if isinstance(step, int) and step < run.first:
                earlier.append(sample)
        run.facts["samples"] = earlier


def opening(run: Run, ranks: Sequence[Mapping[str, Any]]) -> str:
    """What the run is on: ``4 ranks (launch), layout dp2·tp2, cpu, fp32 (why); gloo; vm: 4 ranks on 2 CPU cores``.

    Args:
        ranks: what each rank says of itself, as `all_ranks` returns it on rank 0.
    """
    host = socket.gethostname()
    ranks_on_host = sum(about["host"] == host for about in ranks)
    devices = devices_in_use(run.device, ranks_on_host or 1)
    ranks_text = f"{counted(run.rank.world_size, 'rank')} ({run.rank.source})"
    precision = f"{run.precision.name} ({run.precision.reason})"
    return (
        f"{ranks_text}, layout {run.layout}, {run.device.type}, {precision}; {collective_library()}; {host}: {devices}"
    )


def data_text(data: Mapping[str, Any]) -> str:
    """``text, my.txt: 1 file, 1,003,854 train bytes, 111,540 validation bytes``."""
    names = [str(data[name]) for name in ("dataset", "source") if name in data]
    counts = []
    for name, value in data.items():
        if isinstance(value, int):
            # Such as "files", "train bytes".
            noun = name.replace("_", " ")
            counts.append(counted(value, noun.removesuffix("s"), noun))
    return f"{', '.join(names)}: {', '.join(counts)}"


def end_of(run: Run, totals: Totals) -> dict[str, Any]:
    """What config.json says of a run that is over; if it was resumed, of its last part. On rank 0."""
    seconds = time.time() - began()
    return {
        "ended": utc(time.time()),
        "seconds": seconds,
        "device_hours": seconds * run.rank.world_size / 3600,
        "mean_rates": totals.rates(),
    }


def began() -> float:
    """When `launch`, or else this process, was started: in seconds since 1970."""
    return started(os.environ, time.time())[0]


def utc(seconds: float) -> str:
    """A time in seconds since 1970, as ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def facts_of(run: Run) -> dict[str, Any]:
    """What config.json says of every run."""
    attempt = this_attempt()
    return {
        "module": run.name,
        "name": run.options.name,
        "started": utc(began()),
        "command": command_line(),
        "folder": os.getcwd(),
        "options": run.flags,
        **config_file.facts,
        "layout": str(run.layout),
        "mesh": run.layout.sizes,
        "precision": {"name": run.precision.name, "reason": run.precision.reason},
        "started_by": run.rank.source,
        "launch": os.environ.get(LINE_VARIABLE),
        "site": json.loads(os.environ.get(SITE_VARIABLE, "null")),
        "attempt": None if attempt is None else attempt.as_record(),
        "python": sys.executable,
        "versions": history.versions(),
    }


def all_ranks(run: Run) -> list[dict[str, Any]]:
    """What every rank says of itself, by rank, on rank 0. A collective."""
    local = {
        "rank": run.rank.rank,
        "local_rank": run.rank.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(run.device),
    }
    ranks = []
    for about in run.comm.gather(local):
        coordinates = run.layout.coordinates(about["rank"])
        ranks.append({**about, **coordinates})
    return ranks
