"""The decision tree: chooses a kind of parallelism by a few questions, without a search.

::

    the model fits on one device      → nothing, or DDP where there are more devices
    else, on one device               → offload; where the largest layer does not fit either, more devices
    else, the largest layer does not  → tensor parallel, and what the questions below say
    else, on one host   fast links    → tp, pp or ZeRO, about even
                        slow links    → pp
    else, many hosts    fast links    → ZeRO, or pp · tp · dp
                        slow links    → dp · pp · tp with ZeRO-1

ZeRO-1 is ``zero1``: once in a step the gradients are summed over the slow links, and the updated parameters gathered.
If that does not fit, hsdp shards inside a host, and only the sum of gradients uses the slow links.

A layer that does not fit can also be computed in tiles: `mmm.examples.tiling` shows how.

Source: Hugging Face, "Parallelism methods" (transformers' documentation), whose scalability strategy this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmm.layout import Layout, Techniques
from mmm.parallel.cp.styles import divisors
from mmm.units import GIB
from mmm_lab.planner.candidate import Candidate, rank_of
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.spec import ModelSpec
from mmm_lab.planner.trial import Trial, full_model
from mmm_launch.machines.machine import Machine

FAST_LINK = 1e11  # bytes/s of a device inside a host: NVLink has several times that, PCIe a third
FAST_NETWORK = 2e10  # bytes/s of a device between hosts: 200 Gb/s each, and not shared by several


@dataclass(frozen=True)
class Facts:
    """The answers to the tree's questions.

    Attributes:
        fits: whether the model fits on one device.
        largest_fits: whether the largest layer does.
        fast: whether the slowest links between any two devices are fast.
    """

    fits: bool
    largest_fits: bool
    devices: int
    hosts: int
    fast: bool


@dataclass(frozen=True)
class Decision:
    """The tree's answer.

    Attributes:
        answer: the answer as text.
        axes: axes that it may have, of pp, tp, dp and offload.
        path: each question that was asked, with its answer.
        technique: the data-parallel technique, if the tree names one.
    """

    answer: str
    axes: tuple[str, ...]
    path: tuple[tuple[str, str], ...]
    technique: str = ""


def decide(facts: Facts) -> Decision:
    """The tree's answer, and the path to it."""
    path: list[tuple[str, str]] = []

    # Each question is noted when it is asked: the path is shown.
    def ask(question: str, answer: bool) -> bool:
        path.append((question, "yes" if answer else "no"))
        return answer

    def decision(answer: str, *axes: str, technique: str = "") -> Decision:
        return Decision(answer, axes, tuple(path), technique)

    if ask("does the model fit on one device?", facts.fits):
        if ask("is there more than one device?", facts.devices > 1):
            return decision("DDP", "dp", technique="ddp")
        return decision("nothing: one device")
    first = ""
    if not ask("does the largest layer fit on one device?", facts.largest_fits):
        first = "tp, since a layer does not fit; then "
    if not ask("is there more than one device?", facts.devices > 1):
        if facts.largest_fits:
            return decision("ZeRO with offload to the host", "offload")
        return decision("more devices: a layer does not fit, and tp shards it")
    several_hosts = ask("is there more than one host?", facts.hosts > 1)
    fast = ask("are the links fast?", facts.fast)
    if several_hosts and fast:
        return decision(f"{first}ZeRO (fsdp, hsdp), or pp·tp·dp", "dp", "pp", "tp")
    if several_hosts:
        return decision(f"{first}dp·pp·tp with ZeRO-1 (zero1)", "dp", "pp", "tp", technique="zero1")
    if fast:
        return decision(f"{first}tp, pp or ZeRO (fsdp), about even", "tp", "pp", "dp")
    axes = ["pp", "tp"]
    if facts.largest_fits:
        axes = ["pp"]
    return decision(f"{first}pp, before tp or ZeRO (fsdp)", *axes)


def facts_of(
    spec: ModelSpec,
    machine: Machine,
    memory: MemoryModel,
) -> tuple[Facts, list[str]]:
    """The answers to the tree's questions for a model and a machine, and lines with the numbers behind them."""
    techniques = Techniques(
        data_parallel="ddp", checkpointing="full" if spec.plan.checkpointed else "none", loss_chunks=64
    )
    # The least that one device can do with: one sample, and as much computed again as possible.
    trial = Trial(Layout(dp_shard=1), techniques, (full_model(spec),), local_batch=1)
    full, _ = memory.largest(trial)
    # Its parameters are gathered in full while it computes, however FSDP shards them.
    largest = max(spec.kinds, key=lambda kind: kind.parameters)
    activations = memory.kept(1, False)
    # The layer's parameters and their gradients, and its activations for one sample.
    layer = largest.parameters * 2 * memory.compute + (activations.none + activations.working) * spec.tokens
    # The slowest links between any two of the devices.
    where = "inside the host"
    rate = machine.link_bandwidth
    least = FAST_LINK
    if machine.hosts > 1:
        where = "between hosts"
        rate = machine.network_bandwidth / machine.ranks_per_host
        least = FAST_NETWORK
    facts = Facts(
        fits=full <= machine.budget,
        largest_fits=layer <= machine.budget,
        devices=machine.ranks,
        hosts=machine.hosts,
        fast=rate >= least,
    )
    lines = [
        f"one device would hold {full / GIB:,.1f} GiB (one sample, full checkpointing), "
        f"and {machine.budget / GIB:,.1f} can be used",
        f"the largest layer, {largest.parameters:,} parameters, needs {layer / GIB:,.1f} GiB with its gradient",
    ]
    if machine.ranks > 1:
        lines.append(f"{where} a device has {rate / 1e9:,.1f} GB/s; fast is {least / 1e9:,.0f} and more")
    return facts, lines


def beside_answer(decision: Decision, best: Sequence[Candidate]) -> str:
    """Compares the answer of the search with that of the tree, which does not count seconds.

    Args:
        best: the candidates that fit, the answer first (`SearchResult.best`).
    """
    answer = best[0]
    # Of the candidates that fit, those that the tree would allow.
    following = [candidate for candidate in best if _follows(candidate, decision)]
    if answer in following:
        return f"the answer, {answer.label}, follows it"
    if not following:
        return f"none of that fits: the answer is {answer.label}"
    fastest = min(following, key=rank_of)
    slower = fastest.cost.seconds / answer.cost.seconds - 1
    return f"the answer is {answer.label}: the best that follows the tree, {fastest.label}, is {slower:.0%} slower"


def _follows(candidate: Candidate, decision: Decision) -> bool:
    """Whether a candidate has only axes, and the data-parallel technique, that the tree's answer may have."""
    # The tree does not tell dp_shard from dp_replicate.
    axes = {"dp" if axis.startswith("dp_") else axis for axis in candidate.axes}
    if not axes <= {*decision.axes}:
        return False
    return "dp" not in axes or decision.technique in ("", candidate.techniques.data_parallel)


def across_hosts(tp: int, machine: Machine) -> str:
    """A warning about tensor-parallel groups that span hosts. Empty if each lies on one host."""
    if machine.hosts == 1 or machine.ranks_per_host % tp == 0:
        return ""
    # The largest tp whose groups fill hosts without a rest.
    inside = max(size for size in divisors(machine.ranks_per_host) if size <= tp)
    between = machine.network_bandwidth / machine.ranks_per_host
    return (
        f"tp {tp} spans hosts of {machine.ranks_per_host} devices: each layer waits for the network between them, "
        f"{between / 1e9:,.1f} GB/s a device, {machine.link_bandwidth / 1e9:,.0f} inside a host; "
        f"tp {inside} stays inside"
    )
