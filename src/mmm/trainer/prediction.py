"""What was predicted for a run, in its record once the first step is over, and in the end what was measured. On rank 0.

Memory is that of rank 0. On an accelerator the allocator counts tensors, as the prediction does. A CPU keeps no count
of them: there it is what the process has grown by since the run began, libraries, data and all.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from mmm.runtime.memory import peak_memory

if TYPE_CHECKING:
    from mmm.trainer.resolve import Resolved
    from mmm.trainer.run import Run

ADVICE = "mmm plan --calibrate lets later runs predict it"


def predict_run(run: Run, resolved: Resolved) -> dict[str, Any] | None:
    """For the record. Whatever goes wrong with it is in there instead: a run does not need it."""
    try:
        return _prediction(run, resolved)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _prediction(run: Run, resolved: Resolved) -> dict[str, Any] | None:
    from mmm.plan.machine import known_here  # every import of a trainer would pay for these
    from mmm.plan.predict import predict

    hosts = len(run.config["hosts"])
    site = (run.config["site"] or {}).get("name")
    machine = known_here(run.device.type, site, hosts, run.layout.ranks, torch.get_num_threads())
    found = predict(resolved, run.device.type, run.precision.name, machine)
    if found is None:
        return None
    at = run.layout.coordinates(run.rank.rank)["pp"]
    parts = {name: round(size) for name, size in found.memory[at].items()}
    return {
        "rank": run.rank.rank,
        "memory_bytes": parts,
        "peak_bytes": sum(parts.values()),
        "peak_bytes_by_pp": [round(found.bytes(coordinate)) for coordinate in range(len(found.memory))],
        "step_seconds": found.seconds,
        "machine": found.machine or None,
    }


def report_prediction(run: Run) -> None:
    """Say in a line, and keep in the record, what was predicted and what was measured."""
    predicted = run.config.get("predicted")
    if predicted is None:
        return
    peak, source = peak_memory(run.device, run.memory_before)
    seconds = [each * run.config["global_batch_size"] for each in run.seconds_per_sample]
    step = statistics.median(seconds[1:] or seconds) if seconds else None  # the first step starts what is slow to start
    run.describe(measured={"rank": run.rank.rank, "peak_bytes": peak, "memory": source, "step_seconds": step})
    if "failed" in predicted:
        run.log.info("no prediction: %s", predicted["failed"])
        return
    measured = "not known" if peak is None else f"{_mib(peak)} ({source})"
    words = [f"memory of rank {run.rank.rank}: predicted {_mib(predicted['peak_bytes'])}, measured {measured}"]
    if step is not None and predicted["step_seconds"] is not None:
        words.append(
            f"step: predicted {predicted['step_seconds']:.4g} s ({predicted['machine']}), measured {step:.4g} s"
        )
    elif step is not None:
        words.append(f"step: measured {step:.4g} s; {ADVICE}")
    run.log.info("%s", "; ".join(words))


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"
