"""--profile: some steps of a run in detail, by PyTorch's profiler on all ranks, or by pyinstrument on rank 0.

A profile that fails is given up with a warning: a run never ends for it.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import time_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function

from mmm.history.record.folder import PROFILE_PAGE, PROFILE_TEXT, TRACE
from mmm.layout import Layout
from mmm.models.experts import has_experts
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.pp.recorder import Action, Recorder
from mmm.profile.rank_trace import STEPS, CallRecorder, RankTrace, Slice
from mmm.profile.trace_file import TraceFile
from mmm.runtime.clock_offset import clock_offset
from mmm.runtime.ranks import command_line
from mmm.traffic.count import axes_of
from mmm.trainer.config.profile_options import ProfileOptions, parse_steps
from mmm.trainer.run.core import Run

SKIPPED, STEPS_PROFILED = 3, 3  # the first steps, in which things are made; and how many follow
CHUNK = 1 << 26  # bytes that a rank sends at once
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


class Profile:
    """The profile of a run.

    Args:
        first, end: of the steps that this process makes.
    """

    def __init__(self, run: Run, model: ParallelModel, options: ProfileOptions, first: int, end: int) -> None:
        self.run, self.model, self.kind = run, model, options.profile
        begin = min(first + SKIPPED, max(end - 1, first))
        steps = (
            range(begin, begin + STEPS_PROFILED)
            if options.profile_steps is None
            else parse_steps(options.profile_steps)
        )
        self.steps = range(max(steps.start, first), min(steps.stop, end))
        self.ranks = range(min(run.rank.world_size, options.profile_ranks or 64))
        self.profiler: TorchProfiler | PyinstrumentProfiler | None = None
        if not self.steps:
            run.note(f"--profile_steps {options.profile_steps}: none of them is among the steps {first} to {end - 1}")

    def at(self, step: int) -> None:
        """Before a step begins, and after the last. A collective."""
        if not self.steps or step not in (self.steps.start, self.steps.stop):
            return
        if step == self.steps.start:
            if self.run.rank.rank in (self.ranks if self.kind == "torch" else (0,)):
                self._try("start", self._start)
            return
        if self.kind == "torch":
            self._gather()
        elif self.run.rank.is_main:
            self._try("end", self._text_and_page)

    def _start(self) -> None:
        profiler = TorchProfiler(self.run, self.model) if self.kind == "torch" else PyinstrumentProfiler()
        profiler.start()
        self.profiler = profiler

    def _text_and_page(self) -> None:
        if isinstance(self.profiler, PyinstrumentProfiler) and self.run.outdir is not None:
            self.profiler.stop(self.run.outdir)
            self._describe({"files": [PROFILE_PAGE, PROFILE_TEXT], "ranks": [0]})
            self.run.log.info("profile: %s", self.run.outdir / PROFILE_PAGE)

    def _describe(self, about: dict[str, Any]) -> None:
        self.run.describe(profile={"kind": self.kind, "steps": [self.steps.start, self.steps.stop], **about})

    def _gather(self) -> None:
        """The trace of all ranks, on rank 0. A collective."""
        run, found, traces = self.run, list[bytes](), list[RankTrace]()
        if isinstance(self.profiler, TorchProfiler):
            profiler = self.profiler
            self._try("end", lambda: traces.append(profiler.stop()))
        self.profiler = None
        clock = clock_offset(run.rank, run.device)

        def encode() -> None:
            traces[0].offset, traces[0].error = clock
            found.append(gzip.compress(json.dumps(asdict(traces[0])).encode(), 1))

        if traces:
            self._try("be encoded", encode)
        files = list[TraceFile]()
        if run.outdir is not None and traces:
            path, zero = run.outdir / TRACE, min((each.begin for each in traces[0].slices), default=time_ns())
            self._try("be written", lambda: files.append(TraceFile(path, self.ranks, zero)))
        missing = []
        for rank, payload in self._one_by_one(found[0] if found else b""):
            if not payload:
                missing.append(rank)
            elif files and not self._try("be written", lambda payload=payload: files[0].add(_decode(payload))):  # type: ignore[misc]
                files.clear()
        if files:
            self._try("be written", lambda: self._close(files[0], missing))

    def _close(self, file: TraceFile, missing: list[int]) -> None:
        run, outdir = self.run, self.run.outdir
        assert outdir is not None
        joined = file.close(command=command_line(), layout=str(run.layout))
        about = {"file": TRACE, "ranks": [n for n in self.ranks if n not in missing], **joined._asdict()}
        self._describe(about)
        world = run.rank.world_size
        most = f" of {world}: --profile_ranks takes more" if len(self.ranks) < world else ""
        run.log.info(
            "profile: %s: steps %d to %d of %d ranks%s; arrows of %d collectives and %d transfers",
            outdir / TRACE,
            self.steps.start,
            self.steps.stop - 1,
            len(self.ranks) - len(missing),
            most,
            joined.collectives,
            joined.transfers,
        )
        if lacking := joined.missing + joined.backwards:
            run.log.warning("profile: %d calls have no arrow: not all of their ranks' calls were found", lacking)
        if missing:
            run.log.warning("profile: nothing came from ranks %s", ", ".join(map(str, missing)))

    def _one_by_one(self, own: bytes) -> Iterator[tuple[int, bytes]]:
        """What each profiled rank has, on rank 0, one at a time. A collective."""
        run = self.run
        sizes = torch.zeros(1, dtype=torch.int64, device=run.device) + len(own)
        if run.rank.is_main:
            yield 0, own
        for rank in self.ranks[1:]:
            if run.rank.rank == rank:
                dist.send(sizes, 0)
                for start in range(0, len(own), CHUNK):
                    part = bytearray(own[start : start + CHUNK])
                    dist.send(torch.frombuffer(part, dtype=torch.uint8).to(run.device), 0)
            elif run.rank.is_main:
                dist.recv(sizes, rank)
                parts, left = [], int(sizes.item())
                while left > 0:
                    chunk = torch.empty(min(left, CHUNK), dtype=torch.uint8, device=run.device)
                    dist.recv(chunk, rank)
                    parts.append(chunk.cpu().numpy().tobytes())
                    left -= len(chunk)
                yield rank, b"".join(parts)

    def _try(self, what: str, work: Callable[[], Any]) -> bool:
        """Whether it went well."""
        try:
            work()
        except Exception as error:  # whatever a profiler raises, the run goes on
            text = str(error).partition("\n")[0] or type(error).__name__
            rank = self.run.rank.rank
            self.run.log.log(
                30 if rank == 0 else 40, "--profile %s could not %s on rank %d: %s", self.kind, what, rank, text
            )
            return False
        return True


def _decode(payload: bytes) -> RankTrace:
    found = json.loads(gzip.decompress(payload))
    return RankTrace(**{**found, "slices": [Slice(*each) for each in found["slices"]]})


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

    def __init__(self, run: Run, model: ParallelModel) -> None:
        self.run, self.model = run, model
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say on stderr that it starts and stops
        activities = [ProfilerActivity.CPU]
        if run.device.type in ("cuda", "xpu"):
            activities.append(getattr(ProfilerActivity, run.device.type.upper()))
        self.torch = torch.profiler.profile(activities=activities)
        experts = any(has_experts(module) for module in model.modules.values())
        self.calls = CallRecorder(axes_of(run.layout, run.rank.rank, experts))
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
            self.run.clock.on_mark = self._mark
            stack.callback(setattr, self.run.clock, "on_mark", None)
            self._mark(None)
            self.undo = stack.pop_all()

    def stop(self) -> RankTrace:
        self.undo.close()
        run, label = self.run, rank_label(self.run.layout, self.run.rank.rank)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self.torch.export_chrome_trace(str(file))
            found = json.loads(file.read_text())
        host = os.uname().nodename
        slices = self.parts + self.calls.slices
        base = int(found.get("baseTimeNanoseconds", 0))
        return RankTrace(run.rank.rank, f"{label} on {host}", slices, found["traceEvents"], base)

    def _mark(self, part: str | None) -> None:
        """The clock was started (None), or a part has ended. On an accelerator, by the host's time."""
        now = time_ns()
        if part is None:
            self.first = now
        else:
            action, self.actions.last = self.actions.last, None
            name = PARTS[part] + (f" {action.kind}{action.microbatch}" if action is not None else "")
            self.parts.append(Slice(STEPS, part, name, self.last, now))
            if part == self.run.clock.parts[-1]:
                self.parts.append(Slice(STEPS, "step", f"step {self.run.clock.step}", self.first, now))
                self.first = now  # of programs that start the clock once an epoch
        self.last = now


def rank_label(layout: Layout, rank: int) -> str:
    """``rank 3 · pp1 dp0 tp1``: the axes that have more than one rank."""
    at = [(axis, where) for axis, where in layout.coordinates(rank).items() if layout.sizes[axis] > 1]
    both = layout.dp_replicate > 1 and layout.dp_shard > 1
    names = [f"{axis if both or not axis.startswith('dp_') else 'dp'}{where}" for axis, where in at]
    return f"rank {rank}" + (f" · {' '.join(names)}" if names else "")
