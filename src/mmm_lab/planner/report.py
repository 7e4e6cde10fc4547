"""What a search has found, for people and for programs: text, JSON, and why each kind lost."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from mmm.units import GIB, counted
from mmm_lab.planner.asked import why_not
from mmm_lab.planner.candidate import NEAR, Candidate, Found
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
WAITED = {"dp_shard_cp": "dp_shard", "cp_ring": "cp", "cp_ulysses": "cp"}  # axis of what is sent → of what waits for it


def choices(candidate: Candidate) -> str:
    """The techniques, in words; what is as usual is left out."""
    techniques, layout, count = candidate.techniques, candidate.layout, candidate.trial.microbatches
    shown = {
        techniques.data_parallel: True,
        f"{techniques.schedule}×{techniques.stages_per_rank}": layout.pp > 1,
        f"{count} micro-batches": count > 1 or layout.pp > 1,
        f"{techniques.checkpointing} checkpointing": techniques.checkpointing != "none",
        f"{techniques.cp_style} {techniques.ulysses or ''}".rstrip(): layout.cp > 1,
        f"{techniques.loss_chunks} loss chunks": techniques.loss_chunks > 1,
        f"reshard {techniques.reshard_after_forward}": techniques.reshard_after_forward != "auto",
        "offload": techniques.offload,
    }
    return ", ".join(word for word, is_shown in shown.items() if is_shown)


def largest_wait(candidate: Candidate) -> str:
    """What a step waits for most, in words; "" for nothing."""
    cost = candidate.cost
    waits = {AXIS_NAMES[axis]: seconds for axis, seconds in cost.exposed.items()}
    if cost.bubble:
        waits[f"a bubble of {cost.bubble:.0%}"] = cost.bubble * cost.seconds
    if cost.offload:
        waits["offload"] = cost.offload + cost.optimizer
    name, seconds = max(waits.items(), key=lambda each: each[1], default=("", 0.0))
    return f"{name} takes {seconds:.3g} s of {cost.seconds:.3g}" if seconds > 0.02 * cost.seconds else ""


def why_each(found: Found, budget: float) -> list[Candidate]:
    """The best of each kind, each with why it is where it is."""
    answer = found.best[0] if found.best else None
    explained = []
    for candidate in found.kinds:
        if not candidate.fits:
            why = f"needs {candidate.bytes / GIB:,.1f} GiB of {budget / GIB:,.1f} ({candidate.largest_part})"
            if candidate.bytes <= budget:
                why = f"its offload needs {candidate.host_memory / GIB:,.1f} GiB a rank of the host"
        elif answer is None or candidate.kind == answer.kind:
            why = "the answer"
        else:
            why = _beside(answer, candidate)
        explained.append(replace(candidate, why=why))
    return explained


def _beside(answer: Candidate, candidate: Candidate) -> str:
    """Why a kind that fits is not the answer."""
    slower = candidate.cost.seconds / answer.cost.seconds - 1
    if slower < -0.001:
        return f"{-slower:.1%} faster, and less simple"
    if slower < 0.01:
        return "as fast, to 1%"
    reason = largest_wait(candidate)
    if not reason:
        mode = candidate.techniques.checkpointing
        reason = "compute alone" if mode == "none" else f"it fits with {mode} checkpointing only"
    return f"{slower:.0%} slower: {reason}"


def line_of(candidate: Candidate) -> str:
    rate = candidate.tokens_per_second
    return (
        f"{candidate.layout!s:<36} {candidate.cost.seconds:9.3f} s {rate:13,.0f} {candidate.mfu:6.3f} "
        f"{candidate.bytes / GIB:7.1f} GiB   {choices(candidate)}"
    )


def _devices(machine: Machine) -> str:
    return f"{machine.hosts:,} × {counted(machine.ranks_per_host, 'device')}"


def text_of(search: Search, found: Found, kinds: list[Candidate], top: int) -> list[str]:
    """The best few, and a line why each other kind lost."""
    machine, spec = search.machine, search.spec
    what = "tokens/s" if spec.seq_length else "samples/s" if spec.tokens == 1 else "patches/s"
    lines = [
        f"{spec.name}: {spec.parameters:,} parameters, {search.dtype}, global batch {search.global_batch}"
        + (f" × {spec.seq_length:,} tokens" if spec.seq_length else ""),
        f"{machine.name}: {_devices(machine)} of {machine.gpu_memory / GIB:,.0f} GiB, "
        f"of which {machine.budget / GIB:,.1f} can be used; {counted(found.layouts, 'layout')}",
        "",
        f"{'the best':<36} {'step':>11} {what:>13} {'mfu':>6} {'memory':>11}",
        *(line_of(candidate) for candidate in found.best[:top]),
        *_simpler(found),
        "",
        "why each other kind lost",
    ]
    winner = found.best[0].kind if found.best else ""
    lines += [f"{c.kind:<22} {c.layout!s:<36} {c.why}" for c in kinds if c.kind != winner]
    refused = {kind: why for kind, why in found.refused.items() if not kind.endswith("no dp")}
    lines += [f"{kind:<22} {'':<36} not possible: {why}" for kind, why in refused.items()]
    return lines


def _simpler(found: Found) -> list[str]:
    """That the answer is not the fastest, where it is not."""
    if not found.best or found.best[0] is found.fastest:
        return []
    answer, fastest = found.best[0], found.fastest
    faster = 1 - fastest.cost.seconds / answer.cost.seconds
    beside = f"{fastest.label}, which is {faster:.1%} faster"
    return [f"take {answer.label}: the simplest within {NEAR:.0%} of the best, {beside}"]


def sent_by_axis(search: Search, candidate: Candidate) -> dict[str, float]:
    """Bytes that a rank of the first stage sends in a step."""
    return sent_bytes(search.memory, candidate.trial.stages[0], candidate.trial)


def memory_by_moment(search: Search, candidate: Candidate) -> dict[str, dict[str, float]]:
    """Bytes by part, at each of `MOMENTS`, of the rank that needs most."""
    of_ranks = [search.memory.moments(stage, candidate.trial) for stage in candidate.trial.stages]
    most = max(of_ranks, key=lambda moments: max(sum(parts.values()) for parts in moments))
    return dict(zip(MOMENTS, most, strict=True))


def details(search: Search, candidate: Candidate) -> list[str]:
    """Memory by part of each stage, bytes by axis, and seconds of the step."""
    layout, trial = candidate.layout, candidate.trial
    lines = [f"{'memory, GiB':<16}" + "".join(f"{name:>13}" for name in PARTS) + f"{'all':>10}"]
    for stage in trial.stages:
        parts = search.memory.of_stage(stage, trial)
        name = f"rank {stage.number} of pp" if layout.pp > 1 else "each rank"
        sizes = "".join(f"{parts[part] / GIB:13.2f}" for part in PARTS)
        lines.append(f"{name:<16}{sizes}{sum(parts.values()) / GIB:10.2f}")
    groups = groups_of(layout, search.machine, trial.ulysses)
    lines += ["", f"{'sent a step, GB':<16}{'inside':>13}{'between hosts':>15}{'a rank waits':>15}"]
    for axis, size in sent_by_axis(search, candidate).items():
        outside = between_hosts(axis, size, groups["fsdp" if axis == "dp_shard_cp" else axis])
        waits = candidate.cost.exposed.get(WAITED.get(axis, axis), 0.0)
        lines.append(f"{axis:<16}{(size - outside) / 1e9:13.3f}{outside / 1e9:15.3f}{waits:13.4f} s")
    if candidate.techniques.offload:
        lines += ["", f"a rank has {candidate.host_memory / GIB:,.2f} GiB of its host's memory"]
    cost = candidate.cost
    parts = {"compute": cost.compute, "waiting": sum(cost.exposed.values()), "optimizer": cost.optimizer}
    parts |= {"bubble": cost.bubble * (cost.seconds - cost.optimizer), "offload": cost.offload}
    lines += ["", "seconds: " + ", ".join(f"{name} {value:.4f}" for name, value in parts.items() if value)]
    return lines


def as_json(search: Search, found: Found, kinds: list[Candidate]) -> list[dict[str, Any]]:
    """What ``--json`` writes: the answer, the other layouts that fit, fastest first, then the best of other kinds."""
    reasons = {(candidate.layout, candidate.techniques): candidate.why for candidate in kinds}
    listed = [
        replace(candidate, why=reasons.get((candidate.layout, candidate.techniques), "another of its kind is faster"))
        for candidate in found.best
    ]
    return [
        {
            "layout": {**candidate.layout.sizes, "ep": candidate.layout.ep},
            "techniques": {**asdict(candidate.techniques), "microbatches": candidate.trial.microbatches},
            "memory_bytes": {name: round(candidate.memory[name]) for name in PARTS},
            "memory_by_moment": memory_by_moment(search, candidate),
            "sent_bytes": sent_by_axis(search, candidate),
            "step_seconds": candidate.cost.seconds,
            "compute_seconds": candidate.cost.compute,
            "optimizer_seconds": candidate.cost.optimizer,
            "wait_seconds": dict(candidate.cost.exposed),
            "bubble": candidate.cost.bubble,
            "tokens_per_second": candidate.tokens_per_second,
            "mfu": candidate.mfu,
            "fits": candidate.fits,
            "why": candidate.why,
        }
        for candidate in [*listed, *(candidate for candidate in kinds if not candidate.fits)]
    ]


def missing(search: Search, found: Found) -> str:
    """Why nothing fits, and how much is missing."""
    machine = search.machine
    if not found.kinds:
        why = why_not(search) or next(iter(found.refused.values()), "no layout goes with the model")
        return f"no layout of {search.spec.name} on {counted(machine.ranks, 'device')}: {why}"
    least = min(found.kinds, key=lambda candidate: candidate.bytes)
    over = least.bytes - machine.budget
    if over <= 0:
        each, there = least.host_memory * machine.ranks_per_host / GIB, machine.host_memory / GIB
        return (
            f"nothing fits on {_devices(machine)}: with offload, {least.layout} needs "
            f"{each:,.1f} GiB of a host's memory of {there:,.1f}: {each - there:,.1f} GiB are missing"
        )
    return (
        f"nothing fits on {_devices(machine)}: the least, {least.layout} with "
        f"{choices(least)}, needs {least.bytes / GIB:,.1f} GiB a device ({least.largest_part}) of "
        f"{machine.budget / GIB:,.1f}: {over / GIB:,.1f} GiB are missing"
    )
