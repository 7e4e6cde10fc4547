"""What a dry run shows: tables of memory and of collectives, and whether it fits."""

from __future__ import annotations

from mmm import units
from mmm.traffic.count import OperationTraffic
from mmm.units import MIB, counted
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.tracker import PARTS


def text_of(found: DryRun, budget: int | None = None) -> str:
    """Tables for people, and in the last line whether it fits."""
    first = found.ranks[0]
    head = f"{counted(found.world_size, 'rank')}, layout {first.held.layout}, {first.device}, {first.precision}"
    seconds = sum(report.seconds for report in found.ranks)
    lines = [f"dry run of {head}: {len(found.ranks)} of them in {seconds:.1f} s", *first.notes, "", *_memory(found)]
    for report in found.ranks:
        lines += ["", f"collectives of a step, {rank_name(report)}", *_collectives(report)]
    return "\n".join([*lines, "", verdict(found, budget)[1]])


def rank_name(report: RankReport) -> str:
    return f"rank {report.rank}" + (f" (pp {report.coordinates['pp']})" if report.stages else "")


def _memory(found: DryRun) -> list[str]:
    names = [rank_name(report) for report in found.ranks]
    lines = [f"{'memory at the peak, MiB':<26}" + "".join(f"{name:>20}" for name in names)]
    peaks = [report.peak for report in found.ranks]
    for part in PARTS:
        if any(peak.parts[part] for peak in peaks):
            lines.append(f"  {part:<24}" + "".join(f"{peak.parts[part] / MIB:>20,.1f}" for peak in peaks))
    lines.append(f"  {'together':<24}" + "".join(f"{peak.bytes / MIB:>20,.1f}" for peak in peaks))
    lines.append(f"  {'in':<24}" + "".join(f"{f'{peak.phase}, {peak.doing}':>20}" for peak in peaks))
    return lines


def totals(report: RankReport) -> dict[tuple[str, str], OperationTraffic]:
    """By axis and operation, what a rank sends in a step."""
    found: dict[tuple[str, str], OperationTraffic] = {}
    for sent in (sent for sent in report.calls if sent.call.size > 1):
        found.setdefault((sent.axis, sent.call.operation), OperationTraffic()).add(sent.call)
    return found


def _collectives(report: RankReport) -> list[str]:
    lines = [f"  {'axis':<14}{'operation':<18}{'calls':>7}{'payload, MiB':>16}{'sent, MiB':>14}"]
    for (axis, operation), entry in totals(report).items():
        sizes = f"{entry.payload / MIB:>16,.3f}{entry.sent / MIB:>14,.3f}"
        lines.append(f"  {axis:<14}{operation:<18}{entry.calls:>7}{sizes}")
    return lines


def verdict(found: DryRun, budget: int | None) -> tuple[bool, str]:
    """Whether the run fits into `budget` bytes a rank, and a sentence."""
    worst = found.worst
    peak = worst.peak
    needs = f"{rank_name(worst)} needs {units.size(peak.bytes, 2)} at its peak"
    if budget is None:
        return True, f"{needs}; give --memory to compare it with what a device has"
    if peak.bytes <= budget:
        return True, f"fits: {needs}, of {units.size(budget, 2)}"
    (most, size), *_ = sorted(peak.parts.items(), key=lambda item: -item[1])
    over = f"{units.size(peak.bytes - budget, 2)} more than {units.size(budget, 2)}"
    where = f"in {peak.phase}, {peak.doing}"
    return False, f"does not fit: {needs}, {over}, {where}; the largest part, {most}, has {units.size(size, 2)}"
