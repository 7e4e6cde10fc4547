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

from dataclasses import dataclass
from typing import NamedTuple

from mmm.layout import Layout, Techniques
from mmm.parallel.cp.styles import divisors
from mmm.units import GIB
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


class Decision(NamedTuple):
    """The tree's answer.

    Attributes:
        answer: the answer as text.
        path: each question that was asked, with its answer.
    """

    answer: str
    path: list[tuple[str, str]]


def decide(facts: Facts) -> Decision:
    """The tree's answer, and the path to it."""
    path: list[tuple[str, str]] = []

    # Each question is noted when it is asked: the path is shown.
    def ask(question: str, answer: bool) -> bool:
        path.append((question, "yes" if answer else "no"))
        return answer

    if ask("does the model fit on one device?", facts.fits):
        if ask("is there more than one device?", facts.devices > 1):
            return Decision("DDP", path)
        return Decision("nothing: one device", path)
    first = ""
    if not ask("does the largest layer fit on one device?", facts.largest_fits):
        first = "tp, since a layer does not fit; then "
    if not ask("is there more than one device?", facts.devices > 1):
        if facts.largest_fits:
            return Decision("ZeRO with offload to the host", path)
        return Decision("more devices: a layer does not fit, and tp shards it", path)
    several_hosts = ask("is there more than one host?", facts.hosts > 1)
    fast = ask("are the links fast?", facts.fast)
    # By hosts and links.
    answers = {
        (True, True): "ZeRO (fsdp, hsdp), or pp·tp·dp",
        (True, False): "dp·pp·tp with ZeRO-1 (zero1)",
        (False, True): "tp, pp or ZeRO (fsdp), about even",
        (False, False): "pp, before tp or ZeRO (fsdp)",
    }
    return Decision(f"{first}{answers[several_hosts, fast]}", path)


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
