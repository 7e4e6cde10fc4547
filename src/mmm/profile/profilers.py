"""Profilers of one rank: PyTorch's, and pyinstrument."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import time_ns
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from mmm.history.record.folder import PROFILE_PAGE, PROFILE_TEXT
from mmm.layout import Layout
from mmm.models.experts import has_experts
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.pp.recorder import Action, Recorder
from mmm.profile.rank_trace import STEPS, CallRecorder, RankTrace, Slice
from mmm.runtime.clock import StepClock
from mmm.traffic.operators import axes_of

PARTS = {"dtd": "data", "dtf": "forward", "dtb": "backward", "dtw": "waiting", "dto": "optimizer"}


class ActionNames(Recorder):
    """Which forward or backward a pipeline's rank makes, for the names of slices; in PyTorch's trace as well."""

    def __init__(self) -> None:
        self.last: Action | None = None

    def start(self) -> None:
        pass  # no rank waits for the others

    def note(self, action: Action, work: Callable[[], Any]) -> Any:
        self.last = action
        with record_function(f"stage {action.stage} {action.kind}{action.microbatch}"):
            return work()

    def go_on(self, work: Callable[[], Any]) -> Any:
        return work()


class PyinstrumentProfiler:
    """Where Python spends its time: the calls that are under way, looked at a thousand times a second."""

    def __init__(self) -> None:
        from pyinstrument import Profiler

        self.profiler = Profiler(async_mode="disabled")

    def start(self) -> None:
        self.profiler.start()

    def stop(self, outdir: Path) -> None:
        self.profiler.stop()
        (outdir / PROFILE_TEXT).write_text(self.profiler.output_text(unicode=True, color=False), encoding="utf-8")
        (outdir / PROFILE_PAGE).write_text(self.profiler.output_html(), encoding="utf-8")


class TorchProfiler:
    """PyTorch's profiler on this rank; and as slices of our own the steps, their parts, calls to process groups."""

    def __init__(self, rank: int, layout: Layout, clock: StepClock, model: ParallelModel) -> None:
        self.rank, self.layout, self.clock, self.model = rank, layout, clock, model
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say on stderr that it starts and stops
        activities = [ProfilerActivity.CPU]
        if clock.device.type in ("cuda", "xpu"):
            activities.append(getattr(ProfilerActivity, clock.device.type.upper()))
        self.torch = torch.profiler.profile(activities=activities)
        experts = any(has_experts(module) for module in model.modules.values())
        self.calls = CallRecorder(axes_of(layout, rank, experts, model.techniques.ulysses_size(layout.cp)))
        self.actions, self.parts = ActionNames(), list[Slice]()
        self.undo = ExitStack()
        self.first, self.last = 0, 0  # marks of the step, ns

    def start(self) -> None:
        with ExitStack() as stack:  # undone where it fails
            self.torch.start()
            stack.callback(self.torch.stop)
            stack.enter_context(self.calls)
            if self.model.pipeline is not None:
                self.model.pipeline.times.recorder = self.actions
                stack.callback(setattr, self.model.pipeline.times, "recorder", None)
            self.clock.on_mark = self._mark
            stack.callback(setattr, self.clock, "on_mark", None)
            self._mark(None)
            self.undo = stack.pop_all()

    def stop(self) -> RankTrace:
        self.undo.close()
        label = rank_label(self.layout, self.rank)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self.torch.export_chrome_trace(str(file))
            found = json.loads(file.read_text())
        host = os.uname().nodename
        slices = self.parts + self.calls.slices
        base = int(found.get("baseTimeNanoseconds", 0))
        return RankTrace(self.rank, f"{label} on {host}", slices, found["traceEvents"], base)

    def _mark(self, part: str | None) -> None:
        """The clock was started (None), or a part has ended. On an accelerator, by the host's time."""
        now = time_ns()
        if part is None:
            self.first = now
        else:
            action, self.actions.last = self.actions.last, None
            name = PARTS[part] + (f" {action.kind}{action.microbatch}" if action is not None else "")
            self.parts.append(Slice(STEPS, part, name, self.last, now))
            if part == self.clock.parts[-1]:
                self.parts.append(Slice(STEPS, "step", f"step {self.clock.step}", self.first, now))
                self.first = now  # of programs that start the clock once an epoch
        self.last = now


def rank_label(layout: Layout, rank: int) -> str:
    """``rank 3 · pp1 dp0 tp1``: the axes that have more than one rank."""
    at = [(axis, where) for axis, where in layout.coordinates(rank).items() if layout.sizes[axis] > 1]
    both = layout.dp_replicate > 1 and layout.dp_shard > 1
    names = [f"{axis if both or not axis.startswith('dp_') else 'dp'}{where}" for axis, where in at]
    return f"rank {rank}" + (f" · {' '.join(names)}" if names else "")
