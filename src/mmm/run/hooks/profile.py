"""--profile: some steps of a run in detail, by PyTorch's profiler on each rank.

A profile that fails is given up with a warning: a run never ends because of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from mmm.history.record.folder import TRACES, trace_of
from mmm.run.hook import Hook, Loop
from mmm.run.run import Run
from mmm.run.step import Step

# The first steps make things such as the optimizer's state: they are not typical.
SKIPPED = 3
STEPS_PROFILED = 3
MOST_RANKS = 64


class TorchProfiler:
    """PyTorch's profiler, which writes one trace for each rank."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        # Without this Kineto says on stderr that it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if device.type in ("cuda", "xpu"):
            activities.append(getattr(ProfilerActivity, device.type.upper()))
        self.profiler = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        self.profiler.start()

    def stop(self, outdir: Path) -> None:
        """Write what was seen to the run's folder."""
        self.profiler.stop()
        path = outdir / trace_of(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(path))


class ProfileHook(Hook):
    """Profiles some steps, as the flags say.

    Args:
        options: the group of the program's flags that has ``--profile``.
    """

    def __init__(self, options: Any) -> None:
        self.options = options
        self.profile: Profile | None = None

    def loop(self, run: Run, loop: Loop) -> None:
        if self.options.profile and not run.comm.dry and run.first < loop.steps:
            self.profile = Profile(run, self.options, run.first, loop.steps)
            self.profile.at(run.first)

    def finish(self, run: Run, step: Step) -> None:
        # Writing takes seconds. Here the clock of the next step has not started yet.
        if self.profile is not None:
            self.profile.at(step.index + 1)


class Profile:
    """The profile of a run.

    Args:
        run: the run.
        options: the group of the program's flags that has ``--profile``.
        first: first step that this process makes.
        end: the step after its last one.
    """

    def __init__(self, run: Run, options: Any, first: int, end: int) -> None:
        self.run = run
        if options.profile_steps is None:
            # A short run is profiled in its last step.
            begin = min(first + SKIPPED, max(end - 1, first))
            steps = range(begin, begin + STEPS_PROFILED)
        else:
            steps = range(*options.profile_steps)
        # Only steps that this process makes.
        begin = max(steps.start, first)
        stop = min(steps.stop, end)
        self.steps = range(begin, stop)
        self.ranks = range(min(run.rank.world_size, MOST_RANKS))
        self.profiler: TorchProfiler | None = None
        if not self.steps:
            run.note(f"--profile_steps {options.profile_steps}: none of them is among the steps {first} to {end - 1}")

    def at(self, step: int) -> None:
        """Start or end the profile, if this is its step. Called before a step, and after the last. A collective."""
        if not self.steps:
            return
        if step == self.steps.start and self.run.rank.rank in self.ranks:
            self._try("start", self._start)
        elif step == self.steps.stop:
            self._finish()

    def _start(self) -> None:
        profiler = TorchProfiler(self.run.rank.rank, self.run.device)
        profiler.start()
        self.profiler = profiler

    def _finish(self) -> None:
        """Write the files of each rank; rank 0 says which ranks have written theirs. A collective."""
        run = self.run
        # The folder is known on rank 0 only. A host that does not see it gets one of its own.
        outdir = run.comm.broadcast(run.outdir)
        if outdir is None:
            return
        profiler = self.profiler
        self.profiler = None
        has_written = profiler is not None and self._try("end", lambda: profiler.stop(outdir))
        by_rank = run.comm.gather(has_written)
        written = [rank for rank, done in enumerate(by_rank) if done]
        # Only rank 0 has the list.
        if not written:
            return
        run.describe(
            profile={
                "steps": [self.steps.start, self.steps.stop],
                "files": [trace_of(rank) for rank in written],
                "ranks": written,
            }
        )
        run.log.info(
            "profile: %s: steps %d to %d, on %d of %d ranks",
            outdir / TRACES,
            self.steps.start,
            self.steps.stop - 1,
            len(written),
            run.rank.world_size,
        )
        missing = [rank for rank in self.ranks if rank not in written]
        if missing:
            run.log.warning("profile: nothing came from ranks %s", ", ".join(map(str, missing)))

    def _try(self, action: str, work: Callable[[], Any]) -> bool:
        """Do the work of an action, and warn if it fails. Returns whether it succeeded."""
        try:
            work()
        except Exception as error:
            # Whatever a profiler raises, the run continues.
            first_line = str(error).partition("\n")[0]
            text = first_line or type(error).__name__
            rank = self.run.rank.rank
            # Other ranks log only errors.
            level = logging.WARNING if rank == 0 else logging.ERROR
            self.run.log.log(level, "--profile could not %s on rank %d: %s", action, rank, text)
            return False
        return True
