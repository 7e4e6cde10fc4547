"""What a dry run shows: tables of memory and of collectives, whether it fits, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mmm import units
from mmm.traffic.count import OperationTraffic
from mmm.units import MIB
from mmm_lab.planner.dry_run import DryRun, RankReport
from mmm_lab.planner.tracker import PARTS


def text_of(found: DryRun, budget: int | None = None) -> str:
    """Tables for people, and in the last line whether it fits."""
    first = found.ranks[0]
    head = f"{found.world_size:,} ranks, layout {first.layout}, {first.device}, {first.precision}"
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


def json_of(found: DryRun, budget: int | None, command: Sequence[str]) -> dict[str, Any]:
    """All of it."""
    first = found.ranks[0]
    return {
        "command": list(command),
        "world_size": found.world_size,
        "layout": first.layout,
        "device": first.device,
        "precision": first.precision,
        "memory_budget": budget,
        "fits": None if budget is None else verdict(found, budget)[0],
        "peak_bytes": found.worst.peak.bytes,
        "worst_rank": found.worst.rank,
        "notes": list(first.notes),
        "ranks": [_json_of_rank(report) for report in found.ranks],
    }


def _json_of_rank(report: RankReport) -> dict[str, Any]:
    return {
        "rank": report.rank,
        "coordinates": report.coordinates,
        "seconds": report.seconds,
        "peak": asdict(report.peak),
        "peaks": [asdict(peak) for peak in report.peaks.values()],
        "collectives": [
            {
                "axis": axis,
                "operation": operation,
                "calls": entry.calls,
                "payload_bytes": entry.payload,
                "sent_bytes": round(entry.sent),
            }
            for (axis, operation), entry in totals(report).items()
        ],
        "calls": [[sent.axis, sent.call.operation, sent.call.payload] for sent in report.calls],
    }
