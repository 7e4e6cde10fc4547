"""Which channels of a matrix's output reach which part of the next matrix's input: asked of autograd.

The gradient of a part of the channels, at a tensor before them, is zero where nothing of that tensor reaches them. So
one backward for each rank's part says what the rank needs, whatever operators lie in between::

    v  of rank 0      [ × × × × · · · · ]                     input channels of the second matrix
      │ backward
      ▼
    q k v, fused      [ × × · ·   × × · ·   × × · · ]         three sections, each in two parts
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from mmm_verify.propose.trace import backward_from, generator

MOST_SECTIONS = 16
LEAST = 1e-12  # of the largest gradient: what is below is zero

Sections = tuple[tuple[int, int], ...]  # (channels, parts) of each, as `SectionedColwise` takes them


@dataclass(frozen=True)
class Consumer:
    """The input of a matrix: where it stands in the graph, and its tensor's shape, (…, channels)."""

    edge: GradientEdge
    shape: tuple[int, ...]


def gradients(consumers: list[Consumer], edges: list[GradientEdge], part: int, parts: int) -> list[Tensor | None]:
    """At each of `edges`, the gradient of one part of the channels of all `consumers`; None where there is none."""
    random = generator()
    seeds = []
    for consumer in consumers:
        seed = torch.zeros(consumer.shape, dtype=torch.float64)
        width = consumer.shape[-1] // parts
        own = seed.narrow(-1, part * width, width)
        own.copy_(torch.randn(own.shape, generator=random, dtype=torch.float64))
        seeds.append(seed)
    outputs = [consumer.edge for consumer in consumers]
    return list(torch.autograd.grad(outputs, edges, grad_outputs=seeds, retain_graph=True, allow_unused=True))


def parts_reached(consumers: list[Consumer], producers: list[GradientEdge], parts: int) -> list[list[int]]:
    """By producer, and by channel of its output, the parts that it reaches: a bit each."""
    reached: list[list[int]] = []
    for part in range(parts):
        for index, gradient in enumerate(gradients(consumers, producers, part, parts)):
            if len(reached) == index:
                reached.append([])
            if gradient is None:
                continue
            sizes = gradient.abs().flatten(0, -2).amax(0)
            mask = reached[index] or [0] * len(sizes)
            marked = (sizes > LEAST * sizes.max()).tolist()
            reached[index] = [old | (here << part) for old, here in zip(mask, marked, strict=True)]
    return reached


def sections_of(mask: list[int], parts: int) -> Sections | None:
    """How the channels of a matrix go to the parts; None where they do not go in sections.

    Args:
        mask: of `parts_reached`. Channels that reach nothing (behind a ReLU that is off) go with those that fit.
    """
    for count in range(1, MOST_SECTIONS + 1):  # equal sections, each in one part a rank: one of them is plain columns
        if len(mask) % (count * parts) == 0:
            width = len(mask) // count
            ought = [1 << (channel % width * parts // width) for channel in range(len(mask))]
            if all(bits in (0, wanted) for bits, wanted in zip(mask, ought, strict=True)) and any(mask):
                return ((width, parts),) * count
    everything = (1 << parts) - 1
    sections: list[tuple[int, int]] = []
    runs = [(bits, len(list(run))) for bits, run in groupby(mask)]
    while runs:
        taken: list[int] = []
        reached = 0
        while runs and reached != everything:
            bits, width = runs.pop(0)
            if reached & bits or (taken and width != taken[0]) or bits != _next_bits(reached, bits, parts):
                return None
            taken.append(width)
            reached |= bits
        if reached != everything or parts % len(taken):
            return None
        sections.append((sum(taken), len(taken)))
    return tuple(sections) if len(sections) <= MOST_SECTIONS else None


def _next_bits(reached: int, bits: int, parts: int) -> int:
    """As many bits as `bits` has, the lowest of those not in `reached`."""
    first = reached.bit_length()
    return (((1 << bits.bit_count()) - 1) << first) & ((1 << parts) - 1)


def channels_of(sections: Sections, part: int, parts: int) -> list[int]:
    """The channels of a matrix that one rank has, in their order."""
    own: list[int] = []
    begin = 0
    for width, pieces in sections:
        size = width // pieces
        first = begin + part * pieces // parts * size
        own += range(first, first + size)
        begin += width
    return own


def mixing_node(consumers: list[Consumer], stop: set[Node], parts: int) -> Node | None:
    """The operator nearest to the consumers that computes one element for several parts' channels.

    Args:
        stop: nodes not to go beyond.
    """
    edges: dict[tuple[Node, int], GradientEdge] = {}
    order = list(backward_from([consumer.edge.node for consumer in consumers], stop))
    for consumer in consumers:
        edges[consumer.edge.node, consumer.edge.output_nr] = consumer.edge
    for node in order:
        for before, number in node.next_functions:
            if before is not None and before.name() != ACCUMULATE:
                edges.setdefault((before, number), GradientEdge(before, number))
    keys = list(edges)
    seen: list[Tensor | None] = [None] * len(keys)
    mixed: set[tuple[Node, int]] = set()
    for part in range(parts):
        for index, gradient in enumerate(gradients(consumers, list(edges.values()), part, parts)):
            if gradient is None:
                continue
            here = gradient.abs() > LEAST * gradient.abs().max()
            before_it = seen[index]
            if before_it is not None and bool((here & before_it).any()):
                mixed.add(keys[index])
            seen[index] = here if before_it is None else here | before_it
    for node in order:
        inputs = [(before, number) for before, number in node.next_functions if before is not None]
        own = [key for key in keys if key[0] is node]
        if not any(key in mixed for key in own) and any(key in mixed for key in inputs):
            return node
    return None


ACCUMULATE = "torch::autograd::AccumulateGrad"  # the node of a parameter


def operator_of(node: Node) -> str:
    """An operator's name from its node's: ``NativeLayerNormBackward0`` → ``native_layer_norm``."""
    name = node.name().removesuffix("0").removesuffix("1").removesuffix("2").removesuffix("Backward")
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return words.strip("_")
