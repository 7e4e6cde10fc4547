"""Asks autograd which channels of a matrix's output reach which rank's shard of the next matrix's input.

The gradient of a rank's channels, at a tensor before them, is zero where nothing of that tensor reaches them. So one
backward per rank says what the rank needs, whatever operators lie in between::

    v  of rank 0      [ × × × × · · · · ]                     input channels of the second matrix
      │ backward
      ▼
    q k v, fused      [ × × · ·   × × · ·   × × · · ]         three sections, each in two shards
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from mmm_verify.propose.trace import backward_from

MOST_SECTIONS = 16
# Relative to the largest gradient: anything smaller counts as zero.
LEAST = 1e-12
# The name of a parameter's node.
ACCUMULATE = "torch::autograd::AccumulateGrad"
# (channels, shards) of each section, as `SectionedColwise` takes them.
Sections = tuple[tuple[int, int], ...]
# An operator's node, and which of its outputs.
Output = tuple[Node, int]


@dataclass(frozen=True)
class Channels:
    """The input of a matrix or a convolution, or its output.

    Attributes:
        edge: where it stands in the graph.
        shape: its tensor's shape.
        dim: the dim of its channels: -1 for a matrix, -3 for a convolution of images.
    """

    edge: GradientEdge
    shape: tuple[int, ...]
    dim: int = -1


def gradients(consumers: list[Channels], edges: Sequence[GradientEdge], rank: int, n_ranks: int) -> list[Tensor | None]:
    """The gradient of one rank's channels of all `consumers`, at each of `edges`; None where there is none."""
    random = torch.Generator().manual_seed(0)
    seeds = []
    for consumer in consumers:
        # Random at the rank's channels and zero at the others': random numbers do not cancel each other out.
        seed = torch.zeros(consumer.shape, dtype=torch.float64)
        width = consumer.shape[consumer.dim] // n_ranks
        own = seed.narrow(consumer.dim, rank * width, width)
        own.copy_(torch.randn(own.shape, generator=random, dtype=torch.float64))
        seeds.append(seed)
    outputs = [consumer.edge for consumer in consumers]
    results = torch.autograd.grad(
        outputs,
        edges,
        grad_outputs=seeds,
        # The other ranks go backward through the same graph.
        retain_graph=True,
        allow_unused=True,
    )
    return list(results)


def ranks_reached(consumers: list[Channels], producers: list[Channels], n_ranks: int) -> list[list[int]]:
    """For each producer and each channel of its output, the ranks that it reaches, one bit each."""
    masks: list[list[int]] = [[] for _ in producers]
    edges = [producer.edge for producer in producers]
    for rank in range(n_ranks):
        of_rank = gradients(consumers, edges, rank, n_ranks)
        for index, gradient in enumerate(of_rank):
            if gradient is not None:
                add_reached(masks[index], gradient, producers[index].dim, rank)
    return masks


def add_reached(mask: list[int], gradient: Tensor, dim: int, rank: int) -> None:
    """Note in `mask` which channels of a tensor have a gradient from a rank: one bit for each rank."""
    if not gradient.numel():
        return
    # The largest gradient of each channel: (channels,)
    sizes = gradient.abs().movedim(dim, 0).reshape(gradient.shape[dim], -1).amax(1)
    least = LEAST * sizes.max()
    if not mask:
        mask += [0] * len(sizes)
    for channel, reached in enumerate((sizes > least).tolist()):
        mask[channel] |= reached << rank


def parameter_sections(
    consumers: list[Channels], producers: list[Channels], parameters: Mapping[str, Tensor], n_ranks: int
) -> dict[str, tuple[int, Sections]]:
    """The parameters of which each rank needs a part: the dim that is divided, and its sections.

    Args:
        consumers: what the ranks have a part of.
        producers: the outputs before it.
        parameters: parameters that are used in between, by name.
    """
    if not parameters:
        return {}
    edges = [get_gradient_edge(parameter) for parameter in parameters.values()]
    # PyTorch's backward of a group norm crashes on CPUs if only the gradients of its parameters are asked for.
    edges += [producer.edge for producer in producers]
    of_ranks: list[list[Tensor | None]] = []
    for rank in range(n_ranks):
        of_ranks.append(gradients(consumers, edges, rank, n_ranks))
    divided = {}
    for index, name in enumerate(parameters):
        entry = divided_dim([of_rank[index] for of_rank in of_ranks], n_ranks)
        if entry is not None:
            divided[name] = entry
    return divided


def divided_dim(of_ranks: Sequence[Tensor | None], n_ranks: int) -> tuple[int, Sections] | None:
    """The dim along which a tensor is divided among the ranks, with its sections; None if they all need all of it.

    Args:
        of_ranks: for each rank, the gradient at the tensor of what the rank computes; None if there is none.
    """
    gradients_of_all = [gradient for gradient in of_ranks if gradient is not None]
    if not gradients_of_all:
        return None
    partly = None
    for dim in range(gradients_of_all[0].ndim):
        mask: list[int] = []
        for rank, gradient in enumerate(of_ranks):
            if gradient is not None:
                add_reached(mask, gradient, dim, rank)
        sections = sections_of(mask, n_ranks)
        if sections is None:
            continue
        if all(n_shards > 1 for _, n_shards in sections):
            return dim, sections
        # Keys that all heads share are next to the queries of each head.
        if partly is None and any(n_shards > 1 for _, n_shards in sections):
            partly = (dim, sections)
    return partly


def sections_of(mask: list[int], n_ranks: int) -> Sections | None:
    """How the channels of a matrix are divided among the ranks; None if they are not divided in sections.

    Args:
        mask: the ranks that each channel reaches, from `ranks_reached`. Channels that reach none (behind a ReLU that is
            off) go with those that fit.
    """
    equal = _equal_sections(mask, n_ranks)
    if equal is not None:
        return equal
    everyone = (1 << n_ranks) - 1
    # Neighbouring channels that reach the same ranks.
    runs = []
    for bits, run in groupby(mask):
        width = len(list(run))
        runs.append((bits, width))
    sections: list[tuple[int, int]] = []
    next_run = 0
    while next_run < len(runs):
        # A section: runs of one width that reach one rank, or some, after another, until all ranks are reached.
        section_widths: list[int] = []
        reached = 0
        while next_run < len(runs) and reached != everyone:
            bits, width = runs[next_run]
            next_run += 1
            other_width = section_widths and width != section_widths[0]
            if reached & bits or other_width or bits != _next_bits(reached, bits, n_ranks):
                return None
            section_widths.append(width)
            reached |= bits
        n_shards = len(section_widths)
        if reached != everyone or n_ranks % n_shards:
            return None
        sections.append((sum(section_widths), n_shards))
    if len(sections) > MOST_SECTIONS:
        return None
    return tuple(sections)


def _equal_sections(mask: list[int], n_ranks: int) -> Sections | None:
    """Sections of one width, each divided among all ranks: a single one is plain columns. None if they do not fit."""
    if not any(mask):
        return None
    for count in range(1, MOST_SECTIONS + 1):
        if len(mask) % (count * n_ranks):
            continue
        width = len(mask) // count
        shard = width // n_ranks
        fits = True
        for channel, bits in enumerate(mask):
            rank = channel % width // shard
            own_bit = 1 << rank
            fits = fits and bits in (0, own_bit)
        if fits:
            return ((width, n_ranks),) * count
    return None


def _next_bits(reached: int, bits: int, n_ranks: int) -> int:
    """As many bits as `bits` has, the lowest ones above those in `reached`."""
    ones = (1 << bits.bit_count()) - 1
    all_ranks = (1 << n_ranks) - 1
    return (ones << reached.bit_length()) & all_ranks


def channels_of(sections: Sections, rank: int, n_ranks: int) -> list[int]:
    """The channels of a matrix that one rank has, in their order."""
    channels: list[int] = []
    begin = 0
    for width, n_shards in sections:
        size = width // n_shards
        # With fewer shards than ranks, several ranks have the same shard.
        shard = rank * n_shards // n_ranks
        first = begin + shard * size
        channels += range(first, first + size)
        begin += width
    return channels


def mixing_node(consumers: list[Channels], stop: set[Node], n_ranks: int) -> Node | None:
    """The operator nearest to the consumers that computes one element for several ranks' channels; None if none does.

    Args:
        stop: nodes beyond which the search does not go.
    """
    edges: dict[Output, GradientEdge] = {}
    for consumer in consumers:
        edges[consumer.edge.node, consumer.edge.output_nr] = consumer.edge
    inputs = [consumer.edge.node for consumer in consumers]
    # From the consumers backward.
    order = list(backward_from(inputs, stop))
    for node in order:
        for output in _inputs_of(node):
            if output[0].name() != ACCUMULATE:
                edges.setdefault(output, GradientEdge(*output))
    # Elements that reach the ranks so far, and outputs in which an element reaches two of them.
    seen: dict[Output, Tensor] = {}
    mixed: set[Output] = set()
    for rank in range(n_ranks):
        of_rank = gradients(consumers, list(edges.values()), rank, n_ranks)
        for output, gradient in zip(edges, of_rank, strict=True):
            if gradient is None:
                continue
            if not gradient.numel():
                continue
            sizes = gradient.abs()
            reaches = sizes > LEAST * sizes.max()
            if output in seen:
                if bool((reaches & seen[output]).any()):
                    mixed.add(output)
                reaches = reaches | seen[output]
            seen[output] = reaches
    mixed_nodes = {node for node, _ in mixed}
    for node in order:
        # It mixes if its inputs are mixed and its outputs are not yet.
        takes_mixed = any(output in mixed for output in _inputs_of(node))
        if takes_mixed and node not in mixed_nodes:
            return node
    return None


def _inputs_of(node: Node) -> list[Output]:
    """The outputs that an operator takes."""
    return [(before, index) for before, index in node.next_functions if before is not None]


def operator_of(node: Node) -> str:
    """An operator's name, made from its node's: ``NativeLayerNormBackward0`` → ``native_layer_norm``."""
    name = node.name()
    for ending in ("0", "1", "2", "Backward"):
        name = name.removesuffix(ending)
    operator = ""
    for letter in name:
        if letter.isupper():
            operator += "_"
        operator += letter.lower()
    return operator.strip("_")
