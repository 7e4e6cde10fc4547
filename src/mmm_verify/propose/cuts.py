"""Where a pipeline may split a model: where one tensor alone goes from what is before to what is after.

Asked of autograd's graph: from the loss, without that tensor, nothing before it is reached but constants and parameters
that both sides have. Constants, such as masks and rotary angles, each stage computes for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.autograd.graph import Node

from mmm_verify.propose.channels import ACCUMULATE
from mmm_verify.propose.trace import Trace, backward_from
from mmm_verify.propose.units import lists_of, parameters_of


@dataclass
class Cuts:
    """What was found for pp.

    Attributes:
        after: paths of blocks after which a pipeline may split. refused: other blocks → why not.
        shared: parameters that stages on both sides need, and that have to be kept equal.
    """

    after: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)


def find_cuts(trace: Trace, blocks: list[str]) -> Cuts:
    """The cut points between blocks of one list, one after the other.

    Args:
        blocks: of `Units`; those that are not called once are in none.
    """
    cuts = Cuts()
    called = [path for path in blocks if len(trace.calls.get(path, ())) == 1]
    order = {path: index for index, path in enumerate(trace.calls)}
    called.sort(key=lambda path: order[path])
    for path in called[:-1]:
        why = _why_not(trace, path, cuts)
        if why:
            cuts.refused[path] = why
        else:
            cuts.after.append(path)
    return cuts


def _why_not(trace: Trace, path: str, cuts: Cuts) -> str:
    """Why a pipeline cannot split after a block; empty if it can."""
    edges = [edge for edge in trace.calls[path][0].left if edge is not None]
    used = [edge.node for edge in edges if trace.users.get(edge.node)]
    if not used:
        return "nothing that it returns depends on a parameter"
    after = set(backward_from([trace.root], {used[0]}))
    before = set(backward_from([used[0]], set()))
    both = after & before
    shared = [parameters_of(trace, node) for node in both if node.name() == ACCUMULATE]
    crossing = [node for node in both if node.name() != ACCUMULATE]
    if crossing:
        return f"{_source(trace, crossing, after - before)} goes past it as well"
    cuts.shared += sorted(name for name in shared if name and name not in cuts.shared)
    return ""


def _source(trace: Trace, crossing: list[Node], after: set[Node]) -> str:
    """Whose output a crossing tensor is: of the innermost module that returned it.

    Args:
        after: nodes behind the cut alone.
    """
    names: dict[Node, str] = {}
    for path, calls in trace.calls.items():  # inner modules begin after outer ones, and are named last
        for call in calls:
            names.update({edge.node: path for edge in call.left if edge is not None})
    nearest = [node for node in crossing if any(user in after for user in trace.users[node])]
    found = sorted({names[node] for node in nearest if names.get(node)}, key=list(trace.calls).index)
    return f"the output of {found[-1]}" if found else "another tensor"


def ranges(paths: list[str]) -> list[str]:
    """Paths of lists in a line each: ``layers.0``, ``layers.1``, ``layers.2`` → ``layers.0 … 2``."""
    lines = []
    for parent, own in lists_of(paths).items():
        ends = [path.rpartition(".")[2] for path in own]
        prefix = f"{parent}." if parent else ""
        if len(own) > 2 and all(end.isdigit() for end in ends) and int(ends[-1]) - int(ends[0]) == len(own) - 1:
            lines.append(f"{prefix}{ends[0]} … {ends[-1]}")
        else:
            lines += own
    return lines
