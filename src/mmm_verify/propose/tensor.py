"""Finds tensor parallelism: which matrices can be sharded by columns, and which after them by rows.

If the input of a matrix comes from the outputs of other matrices only through operators that keep channels, or heads,
apart, it can be sharded by rows and those others by columns: no communication is needed in between (Shoeybi et al.,
"Megatron-LM", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.autograd.graph import Node

from mmm_verify.propose.channels import (
    Channels,
    mixing_node,
    operator_of,
    parameter_sections,
    ranks_reached,
    sections_of,
)
from mmm_verify.propose.trace import (
    Call,
    Trace,
    backward_from,
    channel_dim,
    is_convolution,
    is_matrix,
    parent_of,
    pattern_of,
    widths,
)
from mmm_verify.propose.trial import Group, try_group
from mmm_verify.propose.units import parameter_of, ties_of
from mmm_verify.torch_private import BatchNorm, Convolution

# The share of all parameters from which on a parameter outside of matrices is named.
LARGE = 0.02
# The most consumers of a group. A tensor that more matrices take is a residual stream.
MOST_CONSUMERS = 4


@dataclass
class TensorPlan:
    """What was found for tp.

    Attributes:
        n_ranks: number of ranks that matrices are sharded over.
        groups: groups that are sharded.
        attentions: paths of nn.MultiheadAttention that is sharded by heads.
        refused: groups that cannot be sharded, with the reason.
        replicated: matrices in no group, and attention that is not sharded → the reason.
    """

    n_ranks: int
    groups: list[Group] = field(default_factory=list)
    attentions: list[str] = field(default_factory=list)
    refused: list[Group] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)

    @property
    def shards(self) -> bool:
        """Whether anything is sharded."""
        return bool(self.groups or self.attentions)

    @property
    def mixing(self) -> set[str]:
        """Paths of the norms for which groups were refused."""
        return {group.mixing for group in self.refused if group.mixing}


@dataclass
class _Candidate:
    """A matrix, the matrices that its input comes from, and the nodes in between."""

    call: Call
    producers: list[Call]
    between: list[Node]


class _Matrices:
    """The matrices that were called, and where they stand in the graph.

    Attributes:
        calls: their calls.
        by_output: the call whose output a node is.
        owner: the call that a node inside a matrix's computation belongs to.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.calls: list[Call] = []
        self.by_output: dict[Node, Call] = {}
        self.owner: dict[Node, Call] = {}
        for path, calls in trace.calls.items():
            if not is_matrix(trace.model.get_submodule(path)):
                continue
            for call in calls:
                # Where its output stands in the graph. It has no node if no gradient goes through it.
                left = call.left[0] if call.left else None
                if left is not None:
                    self.calls.append(call)
                    self.by_output[left.node] = call
        for call in self.calls:
            for node in trace.inside(call):
                self.owner[node] = call

    def before(self, call: Call) -> _Candidate:
        """Find the matrices that a matrix's input comes from."""
        candidate = _Candidate(call, [], [])
        if call.entered is None:
            return candidate
        entered = call.entered.node
        # The output of another matrix is its input, with nothing in between.
        if entered in self.by_output:
            candidate.producers.append(self.by_output[entered])
            return candidate
        # Nodes do not compare by value, so a dict by id keeps each once, in order.
        producers: dict[int, Call] = {}
        for node in backward_from([entered], set(self.by_output)):
            candidate.between.append(node)
            for before, _ in node.next_functions:
                if before in self.by_output:
                    producers[id(before)] = self.by_output[before]
        candidate.producers += producers.values()
        return candidate

    def after(self, call: Call) -> list[Call] | None:
        """Find the matrices that take a matrix's output.

        Returns:
            None if the output also goes into the loss without passing a matrix, or into more than `MOST_CONSUMERS`.
        """
        assert call.left[0] is not None
        consumers: dict[int, Call] = {}
        seen: set[Node] = set()
        # Breadth first, from the output towards the loss.
        level = [call.left[0].node]
        while level:
            deeper = []
            for node in level:
                users = self.trace.users.get(node, [])
                # Nothing takes it: it is the loss.
                if not users:
                    return None
                for user in users:
                    owner = self.owner.get(user)
                    if owner is not None:
                        consumers[id(owner)] = owner
                    elif user not in seen:
                        seen.add(user)
                        deeper.append(user)
                    if len(consumers) > MOST_CONSUMERS:
                        return None
            level = deeper
        return list(consumers.values())


def find_tensor_plan(trace: Trace, n_ranks: int) -> TensorPlan:
    """Find the groups of a model that can be sharded over `n_ranks` ranks; each is tried on this process."""
    plan = TensorPlan(n_ranks)
    matrices = _Matrices(trace)
    tied = _tied(trace.model)
    candidates = [matrices.before(call) for call in matrices.calls]
    candidates.sort(key=lambda candidate: _order(trace, candidate))
    # Paths of the matrices that have a group.
    taken: set[str] = set()
    # Names of attributes that had to be divided so far.
    known: list[str] = []
    for candidate in candidates:
        if not candidate.producers or candidate.call.path in taken:
            continue
        closed = _closure(matrices, candidate.call)
        if closed is None:
            continue
        consumers, producers, between = closed
        consumer_paths = {call.path for call in consumers}
        producer_paths = {call.path for call in producers}
        paths = consumer_paths | producer_paths
        # Each matrix is in one group, by its columns or by its rows.
        if paths & taken or consumer_paths & producer_paths:
            continue
        group = _group(
            trace,
            consumers=consumers,
            producers=producers,
            between=between,
            n_ranks=n_ranks,
            tied=tied,
            known=known,
        )
        if group.refused:
            plan.refused.append(group)
            continue
        plan.groups.append(group)
        taken |= paths
        for _, name in group.fixes:
            if name not in known:
                known.append(name)
    positions = _positions(trace)
    # In the order in which their first producers are called.
    plan.groups.sort(key=lambda group: positions[next(iter(group.producers))])
    _leave_out_several_calls(trace, plan)
    taken = _members(plan.groups)
    # A matrix may be in a group that was refused and in another one that was not.
    plan.refused = [group for group in plan.refused if not taken & set(group.members)]
    taken |= _members(plan.refused)
    for path, module in trace.model.named_modules():
        if type(module) is not nn.MultiheadAttention or path not in trace.calls:
            continue
        # Its matrices are not called: it computes with their weights itself.
        taken |= {inner for inner, _ in module.named_modules(prefix=path)}
        why = _why_not_by_heads(module, n_ranks)
        if why:
            plan.replicated.setdefault(pattern_of(path), why)
        else:
            plan.attentions.append(path)
    plan.replicated |= _replicated(trace, tied, taken)
    return plan


def _why_not_by_heads(module: nn.MultiheadAttention, n_ranks: int) -> str:
    """Why nn.MultiheadAttention cannot be sharded by heads; empty if it can."""
    if module.num_heads % n_ranks:
        return f"it has {module.num_heads} heads, which do not divide by {n_ranks}"
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return "its keys and values have widths of their own, bias_k or add_zero_attn"
    return ""


def _members(groups: Sequence[Group]) -> set[str]:
    """The paths of all matrices in some groups."""
    paths: set[str] = set()
    for group in groups:
        paths |= set(group.members)
    return paths


def _positions(trace: Trace) -> dict[str, int]:
    """Path of a module → its place in the order of the first calls."""
    return {path: index for index, path in enumerate(trace.calls)}


def _order(trace: Trace, candidate: _Candidate) -> tuple[int, int]:
    """The order in which matrices are tried: those of one inner module first, then those with less in between.

    A residual stream has more in between than the matrices that feed it.
    """
    paths = [candidate.call.path]
    paths += [producer.path for producer in candidate.producers]
    around = _around(trace, paths)
    depth = 0
    if around:
        depth = len(around.split("."))
    return -depth, len(candidate.between)


def _closure(matrices: _Matrices, call: Call) -> tuple[list[Call], list[Call], list[Node]] | None:
    """A matrix with all others that share its producers, their producers, and the nodes in between.

    Returns:
        None if a producer's output also goes elsewhere, as into a residual stream.
    """
    # By id: two calls of a module are two.
    consumers: dict[int, Call] = {id(call): call}
    producers: dict[int, Call] = {}
    # A dict keeps the order, which a set would not.
    between: dict[Node, None] = {}
    todo = [call]
    while todo:
        candidate = matrices.before(todo.pop())
        between |= dict.fromkeys(candidate.between)
        for producer in candidate.producers:
            if id(producer) in producers:
                continue
            producers[id(producer)] = producer
            after = matrices.after(producer)
            if after is None:
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
    n_ranks: int,
    tied: dict[str, str],
    known: Sequence[str],
) -> Group:
    """Make a group with its sections, and try it. It is refused if it cannot be sharded."""
    positions = _positions(trace)
    producers = sorted(producers, key=lambda call: positions[call.path])
    group = Group(
        producers={call.path: () for call in producers},
        consumers=[call.path for call in consumers],
        written=[call.path for call in (*producers, *consumers) if call.written],
    )
    group.around = _around(trace, group.members)
    group.refused = _uneven(trace, group, n_ranks, tied)
    if group.refused:
        return group
    model = trace.model
    inputs = []
    for call in consumers:
        if call.entered is not None:
            dim = channel_dim(model.get_submodule(call.path))
            inputs.append(Channels(call.entered, call.shape, dim))
    outputs = []
    for call in producers:
        if call.left[0] is not None:
            shape = tuple(call.returned[0].shape)
            dim = channel_dim(model.get_submodule(call.path))
            outputs.append(Channels(call.left[0], shape, dim))
    stop = {output.edge.node for output in outputs}
    masks = ranks_reached(inputs, outputs, n_ranks)
    all_sections: list[tuple[int, int]] = []
    for call, mask in zip(producers, masks, strict=True):
        sections = sections_of(mask, n_ranks)
        if sections is None:
            group.refused = _mixing(trace, group, inputs, stop, n_ranks)
            if not group.refused:
                group.refused = f"the channels of {call.path} do not go to the ranks in sections"
            return group
        group.producers[call.path] = sections
        all_sections += sections
    if all(n_shards == 1 for _, n_shards in all_sections):
        # A rank would need all channels of every producer: nothing would be sharded.
        group.refused = "each channel of the one goes into each of the other"
    else:
        group.refused = _between(trace, group, between, inputs, outputs, n_ranks)
    shared = [width for width, n_shards in all_sections if n_shards == 1]
    for path in group.between:
        # The norm of the queries is gathered already, and that of the keys hides which keys a rank needs.
        if group.refused or not _is_norm(trace, path):
            continue
        if trace.calls[path][0].shape[-1] in shared:
            group.refused = f"{path} computes with the channels of several ranks"
            group.mixing = path
    if not group.refused:
        try_group(trace, group, n_ranks, known)
    # Sections that all ranks have are usually keys and values that heads share. But those are narrower than the input.
    input_width = inputs[0].shape[inputs[0].dim]
    is_too_wide = any(width >= input_width for width in shared)
    if group.refused and is_too_wide:
        group.refused = _mixing(trace, group, inputs, stop, n_ranks) or group.refused
    return group


def _mixing(trace: Trace, group: Group, inputs: list[Channels], stop: set[Node], n_ranks: int) -> str:
    """Say which operator computes with the channels of several ranks; empty if none is found.

    If it is one of a norm's, that norm is noted in the group: its channels can be gathered.
    """
    node = mixing_node(inputs, stop, n_ranks)
    if node is None:
        return ""
    operator = operator_of(node)
    path = _module_of(trace, node)
    if path:
        operator = f"{path} ({operator})"
        if _is_norm(trace, path):
            group.mixing = path
    return f"{operator} computes with the channels of several ranks"


def _is_norm(trace: Trace, path: str) -> bool:
    """Whether a module takes one tensor of channels, returns one of its shape, and has a weight for each channel."""
    module = trace.model.get_submodule(path)
    calls = trace.calls.get(path, [])
    if any(module.children()) or len(calls) != 1 or is_matrix(module):
        return False
    (call,) = calls
    args, kwargs = call.arguments
    returned_shapes = [tuple(tensor.shape) for tensor in call.returned]
    if len(args) != 1 or kwargs or returned_shapes != [call.shape]:
        return False
    parameters = list(module.parameters())
    channels = call.shape[-1:]
    return bool(parameters) and all(parameter.shape == channels for parameter in parameters)


def _around(trace: Trace, paths: Sequence[str]) -> str:
    """The innermost module that was called and contains all of these."""
    parent = parent_of(paths[0])
    while parent:
        contains_all = all(path.startswith(f"{parent}.") for path in paths)
        if contains_all and parent in trace.calls:
            break
        parent = parent_of(parent)
    return parent


def _uneven(trace: Trace, group: Group, n_ranks: int, tied: dict[str, str]) -> str:
    """Why a group cannot be sharded, whatever it computes; empty if it may be."""
    model = trace.model
    for path in group.members:
        weight = f"{path}.weight"
        if weight in tied:
            return f"the weight of {path} is that of {tied[weight]} too"
        module = model.get_submodule(path)
        has_more_dims = any(parameter.ndim > 2 for parameter in module.parameters())
        if has_more_dims and not is_convolution(module):
            return f"{path} is not a plain matrix"
        width, outputs = widths(module)
        channels = f"takes {width}"
        if path in group.producers:
            width = outputs
            channels = f"gives {width}"
        if width % n_ranks:
            return f"{path} {channels} channels, which do not divide by {n_ranks}"
    return ""


def _between(
    trace: Trace,
    group: Group,
    between: list[Node],
    inputs: list[Channels],
    outputs: list[Channels],
    n_ranks: int,
) -> str:
    """Note the modules in between that have parameters. Returns why they cannot stay there; empty if they can."""
    model = trace.model
    nodes = set(between)
    for path, calls in trace.calls.items():
        left = calls[0].left[0] if path in trace.by_channel else None
        if left is not None and left.node in nodes:
            group.gathered.append(path)
    parameters: dict[str, nn.Parameter] = {}
    for node in between:
        name = parameter_of(trace, node)
        if not name:
            continue
        path = parent_of(name)
        module = model.get_submodule(path)
        # A module that is not called only keeps the parameter: the module around it uses it.
        if path not in trace.calls or any(map(is_matrix, module.modules())):
            return f"{name} is a parameter of {path or 'the model'} itself, between the matrices"
        if isinstance(module, BatchNorm):
            return f"{path} normalizes over the batch, and keeps statistics of all channels"
        if path not in group.between:
            group.between.append(path)
            for own_name, parameter in module.named_parameters():
                parameters[f"{path}.{own_name}"] = parameter
    group.divided = parameter_sections(inputs, outputs, parameters, n_ranks)
    return ""


def _tied(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter that has several, another one of its names."""
    tied = {}
    for first, *others in ties_of(model):
        tied[first] = others[0]
        for name in others:
            tied[name] = first
    return tied


def _module_of(trace: Trace, node: Node) -> str:
    """The innermost module that computed a node."""
    # "" is the model itself.
    deepest = ""
    for path, calls in trace.calls.items():
        if path.count(".") < deepest.count("."):
            continue
        if any(node in trace.inside(call) for call in calls):
            deepest = path
    return deepest


def _leave_out_several_calls(trace: Trace, plan: TensorPlan) -> None:
    """Refuse groups in which one matrix is called more often than the others: it is in other company then."""
    groups = plan.groups
    plan.groups = []
    for group in groups:
        # Path → number of calls.
        counts = {path: len(trace.calls[path]) for path in group.members}
        n_calls = max(counts.values())
        if n_calls == min(counts.values()):
            plan.groups.append(group)
            continue
        path = max(counts, key=counts.__getitem__)
        group.refused = f"{path} is called {n_calls} times a forward, others of the group not"
        plan.refused.append(group)


def _replicated(trace: Trace, tied: dict[str, str], in_groups: set[str]) -> dict[str, str]:
    """The matrices that are in no group: the pattern of their paths → the reason.

    Args:
        in_groups: paths of the matrices in groups, or in attention that has its own reason.
    """
    reasons: dict[str, str] = {}
    for path, module in trace.model.named_modules():
        if path in in_groups or not is_matrix(module):
            continue
        weight = f"{path}.weight"
        if path not in trace.calls:
            parent = parent_of(path)
            user = pattern_of(parent) or "the model"
            reason = f"it is not called: {user} uses its weight, or nothing does"
        elif weight in tied:
            reason = f"tied to {tied[weight]}"
        else:
            reason = "it does not pair with another layer"
        reasons.setdefault(pattern_of(path), reason)
    total = sum(parameter.numel() for parameter in trace.model.parameters())
    for name, parameter in trace.model.named_parameters():
        path = parent_of(name)
        module = trace.model.get_submodule(path)
        # These are sharded, or have their reason above.
        if path in in_groups or is_matrix(module):
            continue
        # These are known not to be sharded.
        if isinstance(module, nn.Embedding | Convolution):
            continue
        # Experts in one parameter of three dims are an example.
        if parameter.ndim > 1 and parameter.numel() >= LARGE * total:
            reason = f"a parameter of {type(module).__name__} itself, in no matrix module"
            reasons.setdefault(pattern_of(name), reason)
    return reasons
