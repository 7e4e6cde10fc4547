"""A hook that predicts memory and step time of a run after its first step, and compares them with what was measured.

It runs on rank 0, and its memory is that of rank 0's tensors. The allocator of an accelerator counts them. Nothing
counts them on a CPU: there memory is predicted, and not measured.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

import torch

from mmm.run.hook import Hook
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.runtime.memory import peak_memory, start_of_peak
from mmm.units import size

ADVICE = "mmm machine --measure lets later runs predict it"
LAST_ROWS = 1000  # the measured time is the median over so many


class PredictedAndMeasured(Hook):
    """Predicts memory and seconds of a step, and compares them with what was measured."""

    def __init__(self) -> None:
        self.predicted: dict[str, Any] | None = None
        # Seconds for each sample. A row of several steps, or of a smaller batch, then counts like any other.
        self.seconds: deque[float] = deque(maxlen=LAST_ROWS)
        self._memory_before: int | None = None

    def start(self, run: Run) -> None:
        if run.rank.is_main and not run.comm.dry:
            self._memory_before = start_of_peak(run.device)

    def row(self, run: Run, row: Row) -> None:
        if self._memory_before is None:
            return
        if row.samples and row.values:
            self.seconds.append(row.values["dt"] / row.samples)
        if self.predicted is None:
            # The first step is over, and did not wait for this.
            try:
                self.predicted = predict_run(run)
            except Exception as error:
                # A run must not end because its prediction failed.
                self.predicted = {"failed": f"{type(error).__name__}: {error}"}
            run.describe(predicted=self.predicted or None)

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None and self.predicted:
            self._report(run, self.predicted)

    def _report(self, run: Run, predicted: dict[str, Any]) -> None:
        """Log what was predicted and measured in one line, and keep what was measured in the record."""
        assert self._memory_before is not None
        peak, source = peak_memory(run.device, self._memory_before)
        # The first step includes warm-up.
        rates = list(self.seconds)[1:] or list(self.seconds)
        step = statistics.median(rates) * run.job.global_batch_size if rates else None
        run.describe(measured={"rank": run.rank.rank, "peak_bytes": peak, "memory": source, "step_seconds": step})
        if "failed" in predicted:
            run.log.info("no prediction: %s", predicted["failed"])
            return
        text = f"memory of rank {run.rank.rank}: predicted {size(predicted['peak_bytes'], 2)}"
        if peak is not None and run.device.type != "cpu":
            text += f", measured {size(peak, 2)} ({source})"
        if step is not None and predicted["step_seconds"] is None:
            text += f"; step: measured {step:.4g} s; {ADVICE}"
        elif step is not None:
            known = f"{predicted['step_seconds']:.4g} s ({predicted['machine']})"
            text += f"; step: predicted {known}, measured {step:.4g} s"
        run.log.info("%s", text)


def predict_run(run: Run) -> dict[str, Any]:
    """The prediction as the record keeps it. Empty if there are no formulas for the model."""
    # Only rank 0 pays for these imports, after its first step.
    from mmm_lab.planner.measured import machine_here
    from mmm_lab.planner.predict import predict

    machine = machine_here(
        run.device.type,
        (run.facts.get("site") or {}).get("name"),
        len(run.facts.get("hosts", ())) or 1,
        run.layout.ranks,
        torch.get_num_threads(),
    )
    prediction = predict(run.job, run.device.type, run.precision.name, machine)
    if prediction is None:
        return {}
    by_pp = [{name: round(size) for name, size in parts.items()} for parts in prediction.memory]
    # Memory differs between the stages of a pipeline.
    own = by_pp[run.layout.coordinates(run.rank.rank)["pp"]]
    return {
        "rank": run.rank.rank,
        "memory_bytes": own,
        "peak_bytes": sum(own.values()),
        "peak_bytes_by_pp": [sum(parts.values()) for parts in by_pp],
        "step_seconds": prediction.seconds,
        "machine": machine.name if machine else None,
    }
