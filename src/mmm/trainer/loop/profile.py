"""--profile: some steps of a run in detail, by PyTorch's profiler on all ranks, or by pyinstrument on rank 0.

A profile that fails is given up with a warning: a run never ends for it.
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from time import time_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mmm.history.record.folder import PROFILE_PAGE, PROFILE_TEXT, TRACE
from mmm.parallel.parallel_model import ParallelModel
from mmm.profile.profilers import PyinstrumentProfiler, TorchProfiler
from mmm.profile.rank_trace import RankTrace, Slice
from mmm.profile.trace_file import TraceFile
from mmm.runtime.process_group import broadcast_object, gather_objects
from mmm.runtime.ranks import Rank, command_line
from mmm.trainer.config.profile import ProfileOptions, parse_steps
from mmm.trainer.run.core import Run

SKIPPED, STEPS_PROFILED = 3, 3  # the first steps, in which things are made; and how many follow
CHUNK = 1 << 26  # bytes that a rank sends at once


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
        run = self.run
        profiler = (
            TorchProfiler(run.rank.rank, run.layout, run.clock, self.model)
            if self.kind == "torch"
            else PyinstrumentProfiler()
        )
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


ROUNDS = 16  # the shortest of them counts


class Offset(NamedTuple):
    """ns to add to this rank's clock for rank 0's, and by how much that may be wrong."""

    offset: int
    error: int


def clock_offset(rank: Rank, device: torch.device, host: str | None = None, now: Callable[[], int] = time_ns) -> Offset:
    """This rank's. A collective.

    A rank of another host than rank 0's asks rank 0 for its time, as in NTP: rank 0's answer lies in the middle of the
    question's way there and back, up to half of that round trip. Ranks on rank 0's host have its clock.

    Args:
        host: of this rank. now: its clock, ns.

    Source: Mills, "Internet Time Synchronization: The Network Time Protocol", 1991.
    """
    host = host or socket.gethostname()
    if rank.world_size == 1:
        return Offset(0, 0)
    hosts = gather_objects(rank, host)
    first_host = broadcast_object(host)
    message = torch.zeros(1, dtype=torch.int64, device=device)
    best = Offset(0, 0)
    if rank.is_main:
        for other in (number for number, name in enumerate(hosts) if name != host):
            for _ in range(ROUNDS):
                dist.recv(message, other)
                message.item()  # it is here
                dist.send(torch.full_like(message, now()), other)
    elif first_host != host:
        trips = []
        for _ in range(ROUNDS):
            begin = now()
            dist.send(message, 0)
            dist.recv(message, 0)
            answer, end = int(message.item()), now()
            trips.append((end - begin, answer - (begin + end) // 2))
        shortest, offset = min(trips)
        best = Offset(offset, shortest // 2)
    return best
