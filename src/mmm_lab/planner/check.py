"""The memory of a layout on real ranks of this machine, by part, beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from mmm.runtime.memory import peak_memory, start_of_peak
from mmm.runtime.observer import Observer, WatchedRun
from mmm.runtime.ranks import whoami
from mmm.torch_private.dry_run import peaks_by_phase
from mmm.units import MIB
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.predict import predict
from mmm_lab.planner.tracker import PARTS, MemoryTracker, logit_widths

ALLOWED = 0.03  # of memory: the dry run, and the real rank that it stands for
DIFFER = 0.01  # the parts, and what they should add up to: then the text says so
BY_FORMULA = {
    "optimizer": "optimizer state",
    "buffers": "communication",
}  # → the parts of a tracker


@dataclass
class RankMemory:
    """The memory of one real rank at its peak, once it has a model, and what was predicted for it by formula.

    Attributes:
        pp: coordinate. parts: of the tensors, by this package's tracker. bytes: by the allocator of an accelerator, on
            a CPU by PyTorch's own tracker. source: which. formula: bytes by part; None for a model that has none.
    """

    rank: int
    pp: int
    parts: dict[str, int]
    bytes: int
    source: str
    formula: dict[str, float] | None


class CheckedRun(Observer):
    """Watches the memory of the run of this process."""

    def __init__(self) -> None:
        self.memory: RankMemory | None = None

    @contextmanager
    def group(self, run: WatchedRun) -> Iterator[None]:
        clock, layout, resolved = run.clock, run.layout, run.resolved
        device, rank = clock.device, whoami().rank
        pp = layout.coordinates(rank)["pp"]
        predicted = predict(resolved, device.type, run.precision.name)
        tracker = MemoryTracker(device.type, lambda: clock.phase, logit_widths(resolved, layout))
        pytorch_peaks: dict[str, int] = {}
        with ExitStack() as stack:
            stack.enter_context(run.group)
            before = start_of_peak(device)
            if device.type == "cpu":
                pytorch_peaks = stack.enter_context(peaks_by_phase(lambda: clock.phase))
            stack.enter_context(tracker.tracking())
            yield
            allocated, source = peak_memory(device, before)
        peak = max((peak for phase, peak in tracker.peaks().items() if phase != "start"), key=lambda peak: peak.bytes)
        if device.type == "cpu":
            allocated = max(size for phase, size in pytorch_peaks.items() if phase != "start")
            source = "PyTorch's MemTracker"
        formula = dict(predicted.memory[pp]) if predicted is not None else None
        self.memory = RankMemory(rank, pp, peak.parts, allocated or peak.bytes, source, formula)


@dataclass(frozen=True)
class Checked:
    """What was predicted and what was measured. ranks: real ones. line: that starts the same layout."""

    dry: DryRun
    ranks: Sequence[RankMemory]
    line: str

    @property
    def pairs(self) -> list[tuple[RankReport, RankMemory]]:
        """The ranks of the dry run, each with the real one."""
        return [(report, self.ranks[report.rank]) for report in self.dry.ranks]

    @property
    def worst(self) -> tuple[RankReport, RankMemory]:
        """The pair that is furthest apart."""
        return max(self.pairs, key=lambda pair: abs(apart(*pair)))

    @property
    def right(self) -> bool:
        """Whether the memory of every rank of the dry run is as predicted, to `ALLOWED`."""
        return abs(apart(*self.worst)) <= ALLOWED


def apart(report: RankReport, measured: RankMemory) -> float:
    """The error of a prediction."""
    return report.peak_of_steps / measured.bytes - 1


def text_of(checked: Checked) -> str:
    """A table for people."""
    report, measured = checked.worst
    peak = max((p for phase, p in report.peaks.items() if phase != "start"), key=lambda peak: peak.bytes)
    formula = {BY_FORMULA.get(name, name): size for name, size in (measured.formula or {}).items()}
    head = f"{checked.dry.world_size} ranks here, layout {report.layout}, {report.device}, {report.precision}"
    place = f"rank {measured.rank}" + (f", pp {measured.pp}" if report.stages else "")
    lines = [f"check of {head}", "", f"{f'memory at the peak of {place}, MiB':<40}{'dry run':>12}{'measured':>12}"]
    lines[-1] += f"{'formula':>12}" if formula else ""
    for part in PARTS:
        sizes = [peak.parts[part], measured.parts[part], *([formula.get(part, 0.0)] if formula else [])]
        if any(sizes):
            lines.append(f"  {part:<38}" + "".join(f"{size / MIB:>12,.2f}" for size in sizes))
    totals = [peak.bytes, measured.bytes, *([sum(formula.values())] if formula else [])]
    lines.append(f"  {'together':<38}" + "".join(f"{size / MIB:>12,.2f}" for size in totals))
    errors = [f"{totals[0] / totals[1] - 1:>+12.2%}", f"{'':>12}"]
    lines.append(f"  {'apart':<38}" + "".join([*errors, *(f"{total / totals[1] - 1:>+12.2%}" for total in totals[2:])]))
    added = sum(measured.parts.values())
    differ = f", which add up to {added / MIB:,.2f}" if abs(added / measured.bytes - 1) > DIFFER else ""
    lines += [f"  measured together: {measured.source}; parts: this package's tracker{differ}", ""]
    lines.append(verdict(checked))
    return "\n".join([*lines, "", checked.line])


def verdict(checked: Checked) -> str:
    """Whether memory is as predicted, in a sentence."""
    error, count = apart(*checked.worst), len(checked.pairs)
    of = f"of the worst of {count} ranks that differ" if count > 1 else "of the rank that stands for all"
    return f"memory {of} is {error:+.2%} off, {'within' if checked.right else 'MORE THAN'} {ALLOWED:.0%}"


def json_of(checked: Checked) -> dict[str, Any]:
    """All of it."""
    first = checked.dry.ranks[0]
    return {
        "layout": first.layout,
        "device": first.device,
        "precision": first.precision,
        "allowed": ALLOWED,
        "right": checked.right,
        "ranks": [
            {
                **asdict(measured),
                "dry_run": {"bytes": report.peak_of_steps, "parts": report.peak.parts},
                "error": apart(report, measured),
            }
            for report, measured in checked.pairs
        ],
        "launch": checked.line,
    }
