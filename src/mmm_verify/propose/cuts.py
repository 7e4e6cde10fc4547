"""Finds where a pipeline may split a model: where only one tensor crosses from what is before to what is after.

The answer comes from autograd's graph: if that tensor is left out, the loss reaches nothing before it, except constants
and parameters that both sides have. Each stage computes constants, such as masks and rotary angles, for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.autograd.graph import Node

from mmm_verify.propose.channels import ACCUMULATE
from mmm_verify.propose.trace import Trace, backward_from
from mmm_verify.propose.units import lists_of, parameter_of


@dataclass
class Cuts:
    """What was found for pp.

    Attributes:
        after: paths of blocks after which a pipeline may split.
        refused: other blocks → why a pipeline cannot split after them.
        shared: parameters that stages on both sides need and that must be kept equal.
    """

    after: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)


def find_cuts(trace: Trace, blocks: list[str]) -> Cuts:
    """Find the cut points between blocks that follow one another.

    Args:
        trace: one forward of the model.
        blocks: paths of blocks, from `Units`. Blocks that are not called exactly once are ignored.
    """
    cuts = Cuts()
    # They are in the order of their calls. A cut after the last block would leave a stage without one.
    once = []
    for path, calls in trace.calls.items():
        if path in blocks and len(calls) == 1:
            once.append(path)
    for path in once[:-1]:
        why = _why_not(trace, path, cuts)
        if why:
            cuts.refused[path] = why
        else:
            cuts.after.append(path)
    return cuts


def _why_not(trace: Trace, path: str, cuts: Cuts) -> str:
    """Why a pipeline cannot split after a block; empty if it can, and then its shared parameters are noted."""
    (call,) = trace.calls[path]
    outputs = [edge.node for edge in call.left if edge is not None]
    used = [node for node in outputs if trace.users.get(node)]
    if not used:
        return "nothing that it returns depends on a parameter"
    # The tensor that would cross.
    output = used[0]
    after = set(backward_from([trace.root], {output}))
    before = set(backward_from([output], set()))
    crossing = []
    shared = set()
    for node in after & before:
        if node.name() == ACCUMULATE:
            shared.add(parameter_of(trace, node))
        else:
            crossing.append(node)
    if crossing:
        source = _source(trace, crossing, after - before)
        return f"{source} skips past it"
    # A node without a name is not a parameter of the model.
    shared.discard("")
    for name in sorted(shared):
        if name not in cuts.shared:
            cuts.shared.append(name)
    return ""


def _source(trace: Trace, crossing: list[Node], after: set[Node]) -> str:
    """Say which module's output a crossing tensor is: that of the innermost module that returned it.

    Args:
        crossing: nodes on both sides of the cut.
        after: nodes that are only behind the cut.
    """
    names: dict[Node, str] = {}
    # Inner modules are called after outer ones, and so their names replace those of outer ones.
    for path, calls in trace.calls.items():
        for call in calls:
            for edge in call.left:
                if edge is not None:
                    names[edge.node] = path
    # Modules whose output is used directly behind the cut.
    sources = set()
    for node in crossing:
        users = trace.users[node]
        if node in names and any(user in after for user in users):
            sources.add(names[node])
    # "" is the model itself.
    sources.discard("")
    if not sources:
        return "another tensor"
    last = max(sources, key=list(trace.calls).index)
    return f"the output of {last}"


def ranges(paths: list[str]) -> list[str]:
    """Shorten paths of list elements: ``layers.0``, ``layers.1``, ``layers.2`` → ``layers.0 … 2``."""
    lines = []
    for parent, own in lists_of(paths).items():
        ends = [path.rpartition(".")[2] for path in own]
        prefix = f"{parent}." if parent else ""
        first = ends[0]
        last = ends[-1]
        if len(own) <= 2 or not all(end.isdigit() for end in ends):
            lines += own
            continue
        n_between = int(last) - int(first) + 1
        # Without a gap.
        if n_between == len(own):
            lines.append(f"{prefix}{first} … {last}")
        else:
            lines += own
    return lines
