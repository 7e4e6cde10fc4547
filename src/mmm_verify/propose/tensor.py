"""Tensor parallelism, found: which matrices can be sharded by columns, and which after them by rows.

A matrix whose input comes of other matrices' outputs by nothing but operators that keep channels, or heads, apart can
be sharded by rows, and those others by columns: no communication lies between (Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from mmm_verify.propose.channels import (
    ACCUMULATE,
    Consumer,
    mixing_node,
    operator_of,
    parts_reached,
    sections_of,
)
from mmm_verify.propose.trace import Call, Trace, backward_from, is_matrix, parent_of, pattern_of, widths
from mmm_verify.propose.trial import Group, try_group
from mmm_verify.torch_private import Convolution

LARGE = 0.02  # of all parameters: from which on one is named that is in no matrix
MOST_CONSUMERS = 4  # of a group: more is a residual stream


@dataclass
class TensorPlan:
    """What was found for tp.

    Attributes:
        groups: that are sharded. refused: that could not be, with the reason.
        replicated: matrices in no group, with the reason.
    """

    parts: int
    groups: list[Group] = field(default_factory=list)
    refused: list[Group] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)


class _Matrices:
    """The matrices that were called, and where they stand in the graph."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.calls: list[Call] = []
        self.by_output: dict[Node, Call] = {}
        self.owner: dict[Node, Call] = {}  # of each node inside of a matrix's computation
        for path, calls in trace.calls.items():
            if not is_matrix(trace.model.get_submodule(path)):
                continue
            for call in calls:
                if call.left and call.left[0] is not None:
                    self.calls.append(call)
                    self.by_output[call.left[0].node] = call
        for call in self.calls:
            self.owner.update(dict.fromkeys(trace.inside(call), call))

    def before(self, call: Call) -> tuple[list[Call], list[Node]]:
        """The matrices from whose outputs the input of one comes, and the nodes in between."""
        if call.entered is None:
            return [], []
        producers: dict[int, Call] = {}
        between = []
        if call.entered.node in self.by_output:
            return [self.by_output[call.entered.node]], []
        for node in backward_from([call.entered.node], set(self.by_output)):
            between.append(node)
            for before, _ in node.next_functions:
                if before in self.by_output:
                    producers[id(before)] = self.by_output[before]
        return list(producers.values()), between

    def after(self, call: Call) -> tuple[list[Call], bool]:
        """The matrices that the output of one goes into, and whether it goes into the loss without one."""
        assert call.left[0] is not None
        reached: dict[int, Call] = {}
        seen: set[Node] = set()
        level = [call.left[0].node]
        while level:
            deeper = []
            for node in level:
                users = self.trace.users.get(node, [])
                if not users:
                    return list(reached.values()), True
                for user in users:
                    owner = self.owner.get(user)
                    if owner is not None:
                        reached[id(owner)] = owner
                        if len(reached) > MOST_CONSUMERS:
                            return list(reached.values()), True
                    elif user not in seen:
                        seen.add(user)
                        deeper.append(user)
            level = deeper
        return list(reached.values()), False


def find_tensor_plan(trace: Trace, parts: int) -> TensorPlan:
    """The groups of a model that can be sharded over `parts` ranks, found and tried on one process."""
    plan = TensorPlan(parts)
    matrices = _Matrices(trace)
    tied = _tied(trace.model)
    candidates = [(call, *matrices.before(call)) for call in matrices.calls]
    candidates.sort(key=lambda candidate: _order(trace, candidate))
    taken: set[str] = set()
    known: list[str] = []
    for call, producers, _ in candidates:
        if not producers or call.path in taken:
            continue
        closed = _closure(matrices, call)
        if closed is None:
            continue
        consumers, sources, between = closed
        paths = {one.path for one in (*consumers, *sources)}
        if paths & taken or {one.path for one in consumers} & {one.path for one in sources}:
            continue
        group = _group(trace, consumers, sources, between, parts, tied, known)
        if group.refused:
            plan.refused.append(group)
        else:
            taken |= paths
            known += [name for _, name in group.fixes if name not in known]
            plan.groups.append(group)
    order = {path: index for index, path in enumerate(trace.calls)}
    plan.groups.sort(key=lambda group: order[next(iter(group.producers))])
    _leave_out_several_calls(trace, plan)
    taken = {path for group in plan.groups for path in group.members}
    plan.refused = [group for group in plan.refused if not taken & set(group.members)]
    refused = {path for group in plan.refused for path in group.members}
    plan.replicated = _replicated(trace, tied, taken | refused)
    return plan


def _order(trace: Trace, candidate: tuple[Call, list[Call], list[Node]]) -> tuple[int, int]:
    """Matrices of one inner module first; then those with less between them: a residual stream is longer than what
    feeds it."""
    call, producers, between = candidate
    around = _around(trace, [call.path, *(producer.path for producer in producers)])
    return -len(around.split(".")) if around else 0, len(between)


def _closure(matrices: _Matrices, call: Call) -> tuple[list[Call], list[Call], list[Node]] | None:
    """A matrix with all that shares its producers, and their producers, and what is in between; None where a producer's
    output goes elsewhere, as into a residual stream."""
    consumers: dict[int, Call] = {id(call): call}
    producers: dict[int, Call] = {}
    between: dict[Node, None] = {}
    todo = [call]
    while todo:
        before, nodes = matrices.before(todo.pop())
        between |= dict.fromkeys(nodes)
        for producer in before:
            if id(producer) in producers:
                continue
            producers[id(producer)] = producer
            after, leaks = matrices.after(producer)
            if leaks:
                return None
            for consumer in after:
                if id(consumer) not in consumers:
                    consumers[id(consumer)] = consumer
                    todo.append(consumer)
        if len(consumers) > MOST_CONSUMERS:
            return None
    return list(consumers.values()), list(producers.values()), list(between)


def _group(
    trace: Trace,
    consumers: list[Call],
    producers: list[Call],
    between: list[Node],
    parts: int,
    tied: dict[str, str],
    known: Sequence[str],
) -> Group:
    """A group with its sections; refused where it cannot be sharded."""
    order = {path: index for index, path in enumerate(trace.calls)}
    producers = sorted(producers, key=lambda call: order[call.path])
    group = Group({call.path: () for call in producers}, [call.path for call in consumers])
    group.around = _around(trace, group.members)
    group.written = [call.path for call in (*producers, *consumers) if call.written]
    group.refused = _uneven(trace, group, parts, tied)
    if group.refused:
        return group
    inputs = [Consumer(call.entered, call.shape) for call in consumers if call.entered is not None]
    edges: list[GradientEdge] = [call.left[0] for call in producers if call.left[0] is not None]
    stop = {edge.node for edge in edges}
    for call, mask in zip(producers, parts_reached(inputs, edges, parts), strict=True):
        sections = sections_of(mask, parts)
        if sections is None:
            group.refused = f"the channels of {call.path} do not go to the ranks in sections"
            group.refused = _mixing(trace, inputs, stop, parts) or group.refused
            return group
        group.producers[call.path] = sections
    everything = [section for sections in group.producers.values() for section in sections]
    if all(pieces == 1 for _, pieces in everything):
        group.refused = "each channel of the one goes into each of the other"
    else:
        group.refused = _between(trace, group, between)
    if not group.refused:
        try_group(trace, group, parts, known)
    # A section as wide as the input is no key or value that heads share.
    if group.refused and any(pieces == 1 and width >= inputs[0].shape[-1] for width, pieces in everything):
        group.refused = _mixing(trace, inputs, stop, parts) or group.refused
    return group


def _mixing(trace: Trace, inputs: list[Consumer], stop: set[Node], parts: int) -> str:
    """Which operator computes with the channels of several ranks, in words; empty if none is found."""
    node = mixing_node(inputs, stop, parts)
    if node is None:
        return ""
    path = _module_of(trace, node)
    where = f"{path} ({operator_of(node)})" if path else operator_of(node)
    return f"{where} computes with the channels of several ranks"


def _around(trace: Trace, paths: Sequence[str]) -> str:
    """The innermost module that was called, and has all of these."""
    parent = parent_of(paths[0])
    while parent and not (all(path.startswith(f"{parent}.") for path in paths) and parent in trace.calls):
        parent = parent_of(parent)
    return parent


def _uneven(trace: Trace, group: Group, parts: int, tied: dict[str, str]) -> str:
    """Why a group cannot be sharded, whatever it computes."""
    for path in group.members:
        if f"{path}.weight" in tied:
            return f"the weight of {path} is that of {tied[f'{path}.weight']} too"
        if any(p.ndim > 2 for p in trace.model.get_submodule(path).parameters()):
            return f"{path} is no plain matrix"
    for path in group.producers:
        if (width := widths(trace.model.get_submodule(path))[1]) % parts:
            return f"{path} gives {width} channels, which do not divide by {parts}"
    for path in group.consumers:
        if (width := widths(trace.model.get_submodule(path))[0]) % parts:
            return f"{path} takes {width} channels, which do not divide by {parts}"
    return ""


def _between(trace: Trace, group: Group, between: list[Node]) -> str:
    """Note the modules in between that have parameters. Returns why they cannot be where they are."""
    names = {id(p): name for name, p in trace.model.named_parameters()}
    for node in between:
        if node.name() != ACCUMULATE:
            continue
        name = names.get(id(node.variable))  # type: ignore[attr-defined]
        if name is None:
            continue
        path = parent_of(name)
        if any(is_matrix(module) for module in trace.model.get_submodule(path).modules()):
            return f"{name} is a parameter of {path or 'the model'} itself, between the matrices"
        if path not in group.between:
            group.between.append(path)
    return ""


def _tied(model: nn.Module) -> dict[str, str]:
    """By name of a parameter that has several, another of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: next(o for o in some if o != name) for some in names.values() if len(some) > 1 for name in some}


def _module_of(trace: Trace, node: Node) -> str:
    """The innermost module that computed a node."""
    deepest = ""
    for path, calls in trace.calls.items():
        if path.count(".") >= deepest.count(".") and any(node in trace.inside(call) for call in calls):
            deepest = path
    return deepest


def _leave_out_several_calls(trace: Trace, plan: TensorPlan) -> None:
    """Refuse groups of which one matrix is called more often than the others: it is in other company then."""
    kept = []
    for group in plan.groups:
        counts = {path: len(trace.calls[path]) for path in group.members}
        if len(set(counts.values())) == 1:
            kept.append(group)
        else:
            path = max(counts, key=lambda path: counts[path])
            group.refused = f"{path} is called {counts[path]} times a forward, others of the group not"
            plan.refused.append(group)
    plan.groups = kept


def _replicated(trace: Trace, tied: dict[str, str], others: set[str]) -> dict[str, str]:
    """The matrices that no group has, by the pattern of their paths, with the reason."""
    reasons: dict[str, str] = {}
    for path, module in trace.model.named_modules():
        if path in others or not is_matrix(module):
            continue
        if path not in trace.calls:
            above = parent_of(path)
            reason = f"it is not called: {pattern_of(above) or 'the model'} uses its weight, or nothing does"
        elif f"{path}.weight" in tied:
            reason = f"tied to {tied[f'{path}.weight']}"
        else:
            reason = "no second matrix follows, or goes before, by channels alone"
        reasons.setdefault(pattern_of(path), reason)
    total = sum(parameter.numel() for parameter in trace.model.parameters())
    for name, parameter in trace.model.named_parameters():
        module = trace.model.get_submodule(parent_of(name))
        known = is_matrix(module) or isinstance(module, nn.Embedding | Convolution)
        if not known and parameter.ndim > 1 and parameter.numel() >= LARGE * total:
            reasons.setdefault(pattern_of(name), f"a parameter of {type(module).__name__} itself, in no matrix module")
    return reasons
