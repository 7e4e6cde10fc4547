"""What a search found, as text for people and as JSON for programs, with the reason why each kind lost."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from mmm.units import GIB, counted
from mmm_lab.planner.asked import why_not
from mmm_lab.planner.candidate import NEAR, Candidate, SearchResult
from mmm_lab.planner.memory import MOMENTS, PARTS
from mmm_lab.planner.network import groups_of
from mmm_lab.planner.search import Search
from mmm_lab.planner.traffic import between_hosts, sent_bytes
from mmm_launch.machines.machine import Machine

AXIS_NAMES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "experts' all-to-all",
    "pp": "sending between stages",
    "dp_shard": "gathering and reducing parameters",
    "dp_replicate": "summing over replicas",
}
# Bytes are counted on these axes; the waiting for them on those.
WAITED = {"dp_shard_cp": "dp_shard", "cp_ring": "cp", "cp_ulysses": "cp"}


def choices(candidate: Candidate) -> str:
    """The techniques of a candidate. Those with their default value are left out."""
    techniques = candidate.techniques
    layout = candidate.layout
    count = candidate.trial.microbatches
    texts = [techniques.data_parallel]
    if layout.pp > 1:
        texts.append(f"{techniques.schedule}×{techniques.stages_per_rank}")
    if count > 1 or layout.pp > 1:
        texts.append(f"{count} micro-batches")
    if techniques.checkpointing != "none":
        texts.append(f"{techniques.checkpointing} checkpointing")
    if layout.cp > 1:
        texts.append(f"{techniques.cp_style} {techniques.ulysses or ''}".rstrip())
    if techniques.loss_chunks > 1:
        texts.append(f"{techniques.loss_chunks} loss chunks")
    if techniques.reshard_after_forward != "auto":
        texts.append(f"reshard {techniques.reshard_after_forward}")
    if techniques.offload:
        texts.append("offload")
    return ", ".join(texts)


def largest_wait(candidate: Candidate) -> str:
    """What a step waits for most, and how long. Empty if it is less than 2 % of the step."""
    cost = candidate.cost
    waits = {AXIS_NAMES[axis]: seconds for axis, seconds in cost.exposed.items()}
    # The bubble is a fraction of the step, the others are seconds.
    if cost.bubble:
        waits[f"a bubble of {cost.bubble:.0%}"] = cost.bubble * cost.seconds
    if cost.offload:
        # With offload the optimizer runs on the host, and the device waits for it.
        waits["offload"] = cost.offload + cost.optimizer
    if not waits:
        return ""
    name = max(waits, key=waits.__getitem__)
    if waits[name] <= 0.02 * cost.seconds:
        return ""
    return f"{name} takes {waits[name]:.3g} of {cost.seconds:.3g} s"


def why_each(result: SearchResult, budget: float) -> list[Candidate]:
    """The best candidate of each kind, with the reason why it is, or is not, the answer.

    Args:
        budget: bytes of device memory that a rank may use.
    """
    answer = result.best[0] if result.best else None
    explained = []
    for candidate in result.kinds:
        if not candidate.fits:
            why = f"needs {candidate.bytes / GIB:,.1f} GiB ({candidate.largest_part}), {budget / GIB:,.1f} can be used"
            if candidate.bytes <= budget:
                # The device has enough memory, so that it is the host's that is missing.
                why = f"its offload needs {candidate.host_memory / GIB:,.1f} GiB of the host's memory per rank"
        elif answer is None or candidate.kind == answer.kind:
            why = "the answer"
        else:
            why = _why_not_the_answer(answer, candidate)
        explained.append(replace(candidate, why=why))
    return explained


def _why_not_the_answer(answer: Candidate, candidate: Candidate) -> str:
    """How a candidate that fits compares with the answer."""
    slower = candidate.cost.seconds / answer.cost.seconds - 1
    # The answer is the simplest of the nearly fastest, so that others may be faster.
    if slower < -0.001:
        return f"{-slower:.1%} faster, and less simple"
    # The prediction is not more precise than this.
    if slower < 0.01:
        return "as fast, to 1%"
    reason = largest_wait(candidate)
    if not reason:
        mode = candidate.techniques.checkpointing
        reason = f"it fits only with {mode} activation checkpointing"
        if mode == "none":
            reason = "its compute takes longer"
    return f"{slower:.0%} slower: {reason}"


def line_of(candidate: Candidate) -> str:
    """A row of the table of the best."""
    return (
        f"{candidate.layout!s:<36} {candidate.cost.seconds:9.3f} s {candidate.tokens_per_second:13,.0f} "
        f"{candidate.mfu:6.3f} {candidate.bytes / GIB:10.1f} GiB   {choices(candidate)}"
    )


def _devices(machine: Machine) -> str:
    return f"{machine.hosts:,} × {counted(machine.ranks_per_host, 'device')}"


def text_of(
    search: Search,
    result: SearchResult,
    kinds: list[Candidate],
    top: int,
) -> list[str]:
    """The best few layouts, and for each other kind a line why it lost.

    Args:
        kinds: as `why_each` returns them.
        top: how many of the best are shown.
    """
    machine = search.machine
    spec = search.spec
    model = f"{spec.name}: {spec.parameters:,} parameters, {search.dtype}, global batch {search.global_batch}"
    # An image of a CNN is one token.
    rate = "patches/s"
    if spec.tokens == 1:
        rate = "samples/s"
    if spec.seq_length:
        model += f" × {spec.seq_length:,} tokens"
        rate = "tokens/s"
    lines = [
        model,
        f"{machine.name}: {_devices(machine)} of {machine.gpu_memory / GIB:,.0f} GiB, "
        f"of which {machine.budget / GIB:,.1f} can be used; {counted(result.layouts, 'layout')}",
        "",
    ]
    answer = result.best[0] if result.best else None
    if answer is not None:
        reason = "the fastest layout"
        if answer is not result.fastest:
            faster = 1 - result.fastest.cost.seconds / answer.cost.seconds
            fastest = f"{result.fastest.label}, which is {faster:.1%} faster"
            reason = f"the simplest layout within {NEAR:.0%} of the fastest, {fastest}"
        # The first row of the table is the answer, so its reason comes before the table.
        lines += [f"take {answer.label}: {reason}", ""]
    lines.append(f"{'layout':<36} {'step time':>11} {rate:>13} {'mfu':>6} {'device memory':>14}   techniques")
    lines += [line_of(candidate) for candidate in result.best[:top]]
    lines += ["", "why the other kinds of layout lost"]
    for candidate in kinds:
        if answer is None or candidate.kind != answer.kind:
            lines.append(f"{candidate.kind:<22} {candidate.layout!s:<36} {candidate.why}")
    for kind, why in result.refused.items():
        if not kind.endswith("no dp"):
            lines.append(f"{kind:<59} not possible: {why}")
    return lines


def sent_by_axis(search: Search, candidate: Candidate) -> dict[str, float]:
    """Bytes that a rank of the first stage sends in a step."""
    return sent_bytes(search.memory, candidate.trial.stages[0], candidate.trial)


def memory_by_moment(search: Search, candidate: Candidate) -> dict[str, dict[str, float]]:
    """Bytes of each part of memory at each of `MOMENTS`, on the rank that needs most."""
    ranks = [search.memory.moments(stage, candidate.trial) for stage in candidate.trial.stages]
    most = max(ranks, key=lambda moments: max(sum(parts.values()) for parts in moments))
    return dict(zip(MOMENTS, most, strict=True))


def details(search: Search, candidate: Candidate) -> list[str]:
    """Memory of each stage by part, bytes by axis, and the seconds of a step."""
    layout = candidate.layout
    trial = candidate.trial
    cost = candidate.cost
    names = "".join(f"{name:>13}" for name in PARTS)
    lines = [f"memory, GiB     {names}       all"]
    for stage in trial.stages:
        memory = search.memory.of_stage(stage, trial)
        head = "each rank"
        if layout.pp > 1:
            head = f"rank {stage.coordinate} of pp"
        cells = "".join(f"{memory[name] / GIB:13.2f}" for name in PARTS)
        total = sum(memory.values()) / GIB
        lines.append(f"{head:<16}{cells}{total:10.2f}")
    groups = groups_of(layout, search.machine, trial.ulysses)
    # FSDP gathers and reduces over dp_shard and cp as one axis.
    groups["dp_shard_cp"] = groups["fsdp"]
    lines += ["", "sent a step, GB        inside  between hosts   a rank waits"]
    for axis, sent in sent_by_axis(search, candidate).items():
        outside = between_hosts(axis, sent, groups[axis])
        inside = sent - outside
        waits = cost.exposed.get(WAITED.get(axis, axis), 0.0)
        lines.append(f"{axis:<16}{inside / 1e9:13.3f}{outside / 1e9:15.3f}{waits:13.4f} s")
    if candidate.techniques.offload:
        lines += ["", f"a rank has {candidate.host_memory / GIB:,.2f} GiB of its host's memory"]
    seconds = {
        "compute": cost.compute,
        "waiting": sum(cost.exposed.values()),
        "optimizer": cost.optimizer,
        # The optimizer's step comes after the pipeline, and has no bubble.
        "bubble": cost.bubble * (cost.seconds - cost.optimizer),
        "offload": cost.offload,
    }
    lines += ["", "seconds: " + ", ".join(f"{name} {value:.4f}" for name, value in seconds.items() if value)]
    return lines


def as_json(
    search: Search,
    result: SearchResult,
    kinds: list[Candidate],
) -> list[dict[str, Any]]:
    """What ``--json`` writes: the answer, the other layouts that fit, fastest first, then the kinds that do not fit.

    Args:
        kinds: as `why_each` returns them.
    """
    # Only the best of each kind has a reason.
    reasons = {(candidate.layout, candidate.techniques): candidate.why for candidate in kinds}
    not_fitting = [candidate for candidate in kinds if not candidate.fits]
    rows = []
    for candidate in [*result.best, *not_fitting]:
        layout = candidate.layout
        techniques = candidate.techniques
        cost = candidate.cost
        rows.append(
            {
                "layout": {**layout.sizes, "ep": layout.ep},
                "techniques": {**asdict(techniques), "microbatches": candidate.trial.microbatches},
                "memory_bytes": {name: round(candidate.memory[name]) for name in PARTS},
                "memory_by_moment": memory_by_moment(search, candidate),
                "sent_bytes": sent_by_axis(search, candidate),
                "step_seconds": cost.seconds,
                "compute_seconds": cost.compute,
                "optimizer_seconds": cost.optimizer,
                "wait_seconds": dict(cost.exposed),
                "bubble": cost.bubble,
                "tokens_per_second": candidate.tokens_per_second,
                "mfu": candidate.mfu,
                "fits": candidate.fits,
                "why": reasons.get((layout, techniques), "another of its kind is faster"),
            }
        )
    return rows


def missing(search: Search, result: SearchResult) -> str:
    """Why nothing fits, and how much memory is missing."""
    machine = search.machine
    if not result.kinds:
        why = why_not(search) or next(iter(result.refused.values()), "no layout goes with the model")
        return f"no layout of {search.spec.name} on {counted(machine.ranks, 'device')}: {why}"
    # The kind that comes closest to fitting.
    least = min(result.kinds, key=lambda candidate: candidate.bytes)
    over = least.bytes - machine.budget
    if over <= 0:
        # With offload it fits the device, but not the host.
        needed = least.host_memory * machine.ranks_per_host / GIB
        available = machine.host_memory / GIB
        return (
            f"nothing fits on {_devices(machine)}: with offload, {least.layout} needs "
            f"{needed:,.1f} GiB of the host's memory, which has {available:,.1f}: "
            f"{needed - available:,.1f} GiB are missing"
        )
    return (
        f"nothing fits on {_devices(machine)}: the least, {least.layout} with "
        f"{choices(least)}, needs {least.bytes / GIB:,.1f} GiB per device ({least.largest_part}), and "
        f"{machine.budget / GIB:,.1f} can be used: {over / GIB:,.1f} GiB are missing"
    )
