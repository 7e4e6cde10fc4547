"""What was predicted for a run, in its record once the first step is over, and in the end what was measured. On rank 0.

Memory is that of rank 0, of its tensors: an accelerator's allocator counts them. A CPU keeps no count of them: there
memory is predicted, and not measured.
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
LAST_ROWS = 1000  # whose seconds count


class PredictedAndMeasured(Hook):
    """Predicts memory and seconds of a step, and compares."""

    def __init__(self) -> None:
        self.predicted: dict[str, Any] | None = None
        self.seconds: deque[float] = deque(maxlen=LAST_ROWS)  # of a sample
        self._to_predict = False
        self._memory_before = 0

    def start(self, run: Run) -> None:
        if run.rank.is_main and not run.comm.dry:
            self._to_predict = True
            self._memory_before = start_of_peak(run.device)

    def row(self, run: Run, row: Row) -> None:
        if not run.rank.is_main:
            return
        if row.samples and row.values:
            self.seconds.append(row.values["dt"] / row.samples)
        if self._to_predict:  # the first step did not wait for it
            self._to_predict = False
            try:
                self.predicted = predict_run(run)
            except Exception as error:  # whatever goes wrong: a run does not need it
                self.predicted = {"failed": f"{type(error).__name__}: {error}"}
            run.describe(predicted=self.predicted)

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None and self.predicted is not None:
            self._report(run, self.predicted)

    def _report(self, run: Run, predicted: dict[str, Any]) -> None:
        """Say in a line, and keep in the record, what was predicted and what was measured."""
        peak, source = peak_memory(run.device, self._memory_before)
        seconds = [each * run.job.global_batch_size for each in self.seconds]
        step = statistics.median(seconds[1:] or seconds) if seconds else None  # the first starts what is slow to start
        run.describe(measured={"rank": run.rank.rank, "peak_bytes": peak, "memory": source, "step_seconds": step})
        if "failed" in predicted:
            run.log.info("no prediction: %s", predicted["failed"])
            return
        said = [f"memory of rank {run.rank.rank}: predicted {size(predicted['peak_bytes'], 2)}"]
        if peak is not None and run.device.type != "cpu":
            said[0] += f", measured {size(peak, 2)} ({source})"
        if step is not None and predicted["step_seconds"] is not None:
            machine = predicted["machine"]
            said.append(f"step: predicted {predicted['step_seconds']:.4g} s ({machine}), measured {step:.4g} s")
        elif step is not None:
            said.append(f"step: measured {step:.4g} s; {ADVICE}")
        run.log.info("%s", "; ".join(said))


def predict_run(run: Run) -> dict[str, Any] | None:
    """For the record; None where nothing is known of the model."""
    # Only rank 0 pays for these imports, after its first step.
    from mmm_lab.planner.measured import machine_here
    from mmm_lab.planner.predict import predict

    facts = run.facts
    site = (facts.get("site") or {}).get("name")
    hosts = len(facts.get("hosts", ())) or 1
    machine = machine_here(run.device.type, site, hosts, run.layout.ranks, torch.get_num_threads())
    prediction = predict(run.job, run.device.type, run.precision.name, machine)
    if prediction is None:
        return None
    coordinate = run.layout.coordinates(run.rank.rank)["pp"]
    parts = {name: round(size) for name, size in prediction.memory[coordinate].items()}
    return {
        "rank": run.rank.rank,
        "memory_bytes": parts,
        "peak_bytes": sum(parts.values()),
        "peak_bytes_by_pp": [round(prediction.bytes(stage)) for stage in range(len(prediction.memory))],
        "step_seconds": prediction.seconds,
        "machine": prediction.machine or None,
    }
