"""What a dry run shows: tables of memory and of collectives, and whether the run fits."""

from __future__ import annotations

from mmm import units
from mmm.traffic.count import OperationTraffic
from mmm.units import MIB, counted
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.tracker import PARTS


def text_of(dry: DryRun, budget: float | None = None) -> str:
    """Tables for people, and in the last line whether the run fits.

    Args:
        budget: bytes of device memory of one rank; None if they are not known.
    """
    # Layout, device, precision and notes are the same on every rank.
    first = dry.ranks[0].held
    all_ranks = counted(dry.world_size, "rank")
    head = f"{all_ranks}, layout {first.layout}, {first.device}, {first.precision}"
    seconds = sum(report.seconds for report in dry.ranks)
    lines = [f"dry run of {head}: {len(dry.ranks)} of them in {seconds:.1f} s"]
    lines += first.notes
    lines.append("")
    lines += _memory(dry)
    for report in dry.ranks:
        lines.append("")
        lines.append(f"collectives of a step, {rank_name(report)}")
        lines += _collectives(report)
    _, sentence = verdict(dry, budget)
    lines += ["", sentence]
    return "\n".join(lines)


def rank_name(report: RankReport) -> str:
    """``rank 4``, or in a pipeline ``rank 4 (pp 1)``."""
    if report.held.stage_sizes:
        return f"rank {report.rank} (pp {report.coordinates['pp']})"
    return f"rank {report.rank}"


def _memory(dry: DryRun) -> list[str]:
    """The table of memory: a column for each rank."""

    def row(head: str, cells: list[str]) -> str:
        return f"{head:<26}" + "".join(f"{cell:>20}" for cell in cells)

    # Each rank has its own peak, which need not be in the same phase.
    peaks = [report.peak for report in dry.ranks]
    lines = [row("memory at the peak, MiB", [rank_name(report) for report in dry.ranks])]
    for name in PARTS:
        sizes = [peak.parts[name] / MIB for peak in peaks]
        # Parts that no rank has at its peak are left out.
        if any(sizes):
            lines.append(row(f"  {name}", [f"{size:,.1f}" for size in sizes]))
    lines.append(row("  together", [f"{peak.bytes / MIB:,.1f}" for peak in peaks]))
    lines.append(row("  in", [f"{peak.phase}, {peak.doing}" for peak in peaks]))
    return lines


def totals(report: RankReport) -> dict[tuple[str, str], OperationTraffic]:
    """What a rank sends in a step, by axis and operation."""
    by_operation: dict[tuple[str, str], OperationTraffic] = {}
    for sent in report.calls:
        # A group of one rank sends nothing.
        if sent.call.size > 1:
            by_operation.setdefault((sent.axis, sent.call.operation), OperationTraffic()).add(sent.call)
    return by_operation


def _collectives(report: RankReport) -> list[str]:
    """The table of a rank's collectives."""
    lines = ["  axis          operation           calls    payload, MiB     sent, MiB"]
    for (axis, operation), entry in totals(report).items():
        payload = entry.payload / MIB
        sent = entry.sent / MIB
        lines.append(f"  {axis:<14}{operation:<18}{entry.calls:>7}{payload:>16,.3f}{sent:>14,.3f}")
    return lines


def verdict(dry: DryRun, budget: float | None) -> tuple[bool, str]:
    """Whether the run fits into `budget` bytes on each rank, and a sentence that says so."""
    worst = dry.worst
    peak = worst.peak
    needs = f"{rank_name(worst)} needs {units.size(peak.bytes, 2)} at its peak"
    if budget is None:
        return True, f"{needs}; give --memory to compare it with what a device has"
    available = units.size(budget, 2)
    if peak.bytes <= budget:
        return True, f"fits: {needs}, of {available}"
    # What to look at first: the largest part of the peak, such as activations.
    largest = max(peak.parts, key=peak.parts.__getitem__)
    its_size = units.size(peak.parts[largest], 2)
    over = units.size(peak.bytes - budget, 2)
    moment = f"in {peak.phase}, {peak.doing}"
    text = f"does not fit: {needs}, {over} more than {available}, {moment}"
    return False, f"{text}; the largest part, {largest}, has {its_size}"
