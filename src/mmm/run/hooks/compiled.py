"""Says after the first step whether torch.compile has compiled what it should: it falls back silently."""

from __future__ import annotations

from mmm.parallel.compile import CompileReport
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.hook import Hook
from mmm.run.run import Run
from mmm.run.step import Step


class Compiled(Hook):
    def __init__(self) -> None:
        self.report: CompileReport | None = None

    def state(self, run: Run) -> None:
        for model in run.objects.values():
            if isinstance(model, ParallelModel) and model.techniques.compile:
                self.report = CompileReport(model.modules.values())

    def finish(self, run: Run, step: Step) -> None:
        # Modules are compiled in their first forward and backward.
        if self.report is not None:
            self.report.log()
            self.report = None
