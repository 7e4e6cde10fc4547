"""Tensor parallelism by lanes: each rank computes its lanes of a layer one after the other, on shards of their own.

It takes a plan's styles of `mmm.parallel.tp.local`, and computes what they compute, with T lanes in place of tp ranks.
A kernel's result may depend on the shape of what it is given, so each lane has calls of its own::

    x                   (batch, seq/tp, dim)      this rank's tokens
      │ split, all-gather
      ▼                 (batch, seq, dim)         for each lane the same
    Columns, Rows       lane 0 │ lane 1 │ …       one after the other, each with its 1/T of the matrices
      │
      ▼                 (batch, seq, dim)         each lane's summand: a tree over the lanes, an all-to-all, a tree
    x                   (batch, seq/tp, dim)

Norms take the tokens lane by lane, because the gradient of their weights is a sum over tokens. The loss takes the
vocabulary lane by lane. With one rank the axis has no group, and the sums are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from mmm.errors import LayoutError
from mmm.layout import PADDING
from mmm.nn.dropout import Dropout
from mmm.parallel.exact.lanes import FanOut, GatherLanes, JoinChunks, LaneAxis, ScatterSum, SplitChunks, computing_with
from mmm.parallel.local import to_local
from mmm.parallel.plan import Plan, sharded_dim
from mmm.parallel.tp.local import TOKENS, Columns, ColumnsThenRows, Logits, Rows, Vocabulary, own_rows
from mmm.parallel.tp.replicated import Owners, PartialGradient, Replicated, replicate
from mmm.parallel.tp.tensor_parallel import ShardedDropout, styles_of
from mmm.torch_private.module import own_parameters

Forward = Callable[..., Tensor]
MATRICES = (Columns, Rows, Vocabulary, Logits)
KNOWN = (*MATRICES, ColumnsThenRows, PartialGradient, Replicated, ShardedDropout)


def check_tensor_lanes(model: nn.Module, plan: Plan, lanes: int) -> None:
    """Check that a model can be computed by lanes along tp. Needs no process group.

    Raises:
        LayoutError: a style of the plan has no lanes, or a size does not divide into them; the message has its name.
    """
    # Each lane is what a rank of tp would be, so the styles are those for as many ranks.
    for path, style in styles_of(model, plan, lanes):
        module: Any = model.get_submodule(path)
        problem = ""
        if type(style) not in KNOWN:
            style_name = type(style).__name__
            problem = f"{style_name} has no lanes"
        elif isinstance(style, Columns) and style.heads is not None and style.heads % lanes:
            problem = f"its {style.heads} heads do not divide into {lanes} lanes"
        elif isinstance(style, MATRICES):
            size = module.weight.shape[style.own_dims["weight"]]
            if size % lanes:
                problem = f"its {size} rows or columns do not divide into {lanes} lanes"
        elif isinstance(style, ShardedDropout) and module.p > 0:
            problem = f"dropout {module.p} has no lanes: use 0"
        if problem:
            raise LayoutError(f"{lanes} lanes along tp: {path}: {problem}; use fewer lanes along tp")


def column_lanes(model: nn.Module, plan: Plan, lanes: int) -> dict[str, int]:
    """Return the number of lanes along tp, by the name of each parameter whose dim 1 they shard. Empty for 1 lane."""
    if lanes == 1:
        return {}
    return {name: lanes for name, dim in _sharded_dims(model, plan).items() if dim == 1}


def _sharded_dims(model: nn.Module, plan: Plan) -> dict[str, int | None]:
    """Return the dim that tp shards, by the name of each parameter. A tied weight has an entry for each name."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: sharded_dim(model, plan, name) for name in names}


def apply_tensor_lanes(
    model: nn.Module,
    mesh: DeviceMesh | None,
    plan: Plan,
    lanes: int,
) -> None:
    """Shard a model in place over tp, and have its forward compute lane by lane.

    Args:
        mesh: the tp axis. None: one rank has all lanes, and parameters stay plain tensors.
        lanes: number of lanes over all ranks.
    """
    axis = LaneAxis(lanes, mesh)
    dims = _sharded_dims(model, plan)
    # The innermost first: a layer replicates only what its matrices have left.
    styles = list(styles_of(model, plan, axis.size))
    styles.sort(key=lambda pair: pair[0].count("."), reverse=True)
    for path, style in styles:
        _shard(model.get_submodule(path), style, mesh)
    # Inside of these a lane has its own heads, and what is replicated computes on them.
    layers = tuple(f"{path}." for path, style in styles if isinstance(style, ColumnsThenRows))
    for path, style in styles:
        module: Any = model.get_submodule(path)
        own_dims = {}
        for name, _ in module.named_parameters():
            own_dims[name] = dims[f"{path}.{name}"]
        parts = LaneParameters(module, own_dims, axis)
        if isinstance(style, ColumnsThenRows):
            module.forward = _layer(module.forward, parts, axis, style.tokens)
        elif isinstance(style, Vocabulary):
            module.forward = _look_up(parts, axis)
        elif isinstance(style, Logits):
            module.forward = _logits(module.forward, parts, axis, mesh)
            # `loss_of` finds it.
            module.lane_loss = LaneLoss(axis)
        elif isinstance(style, PartialGradient) and not path.startswith(layers):
            module.forward = _by_tokens(module.forward, parts, axis)


def _shard(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh | None) -> None:
    """Make the parameters that a style is for DTensors, in place; with one rank they stay as they are."""
    if mesh is None or isinstance(module, Dropout):
        return
    if isinstance(style, MATRICES):
        style.shard(module, mesh)
    elif isinstance(style, Replicated):
        style._apply(module, mesh)
    else:
        replicate(module, None, mesh)


class LaneParameters:
    """The parameters of a module, as each lane computes with them.

    Args:
        dims: maps a parameter's name in the module to the dim that lanes shard, or None: each lane has all of it.
    """

    def __init__(
        self,
        module: nn.Module,
        dims: Mapping[str, int | None],
        axis: LaneAxis,
    ) -> None:
        self.axis = axis
        self.dims = dims
        # The module that has a parameter, and the parameter's name in it.
        self.owners: Owners = {}
        # A bias of a matrix that is sharded by rows is added by the first lane, and the others add zeros.
        self.once = set()
        for name in dims:
            path, _, own_name = name.rpartition(".")
            self.owners[name] = (module.get_submodule(path), own_name)
            weight = f"{path}.weight".removeprefix(".")
            if own_name == "bias" and dims.get(weight) == 1:
                self.once.add(name)

    def by_lane(self) -> list[dict[str, Tensor]]:
        """For each lane of this rank, its tensors by name. Backward sums over lanes, and over ranks what all have."""
        lanes: list[dict[str, Tensor]] = [{} for _ in range(self.axis.lanes)]
        for name, (owner, own_name) in self.owners.items():
            parameter: Any = own_parameters(owner)[own_name]
            if isinstance(parameter, DTensor):
                parameter = parameter.to_local(grad_placements=parameter.placements)
            dim = self.dims[name]
            if dim is None:
                tensors = FanOut.apply(parameter, self.axis.lanes, self.axis)
            else:
                tensors = SplitChunks.apply(parameter, self.axis.lanes, dim)
            for index, tensor in enumerate(tensors):
                lane = self.axis.first_lane + index
                if name in self.once and lane > 0:
                    # A zero that keeps the graph, so that each lane's copy has a gradient.
                    tensor = tensor * 0
                lanes[index][name] = tensor
        return lanes


def _layer(
    forward: Forward,
    parts: LaneParameters,
    axis: LaneAxis,
    tokens: bool,
) -> Forward:
    """Return the forward of a layer of columns and then rows."""

    def lane_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # (batch, seq, dim): for each lane the same.
        if tokens:
            chunks = SplitChunks.apply(x, axis.lanes, TOKENS)
            inputs = GatherLanes.apply(axis, TOKENS, *chunks)
        else:
            inputs = FanOut.apply(x, axis.lanes, axis)
        terms = []
        for lane_input, tensors in zip(inputs, parts.by_lane(), strict=True):
            with computing_with(parts.owners, tensors):
                term = forward(lane_input, *args, **kwargs)
            terms.append(term)
        if tokens:
            # (batch, seq/T, dim) for each lane
            chunks = ScatterSum.apply(axis, TOKENS, *terms)
            return JoinChunks.apply(TOKENS, *chunks)
        return SumLanes.apply(axis, *terms)

    return lane_forward


def _by_tokens(forward: Forward, parts: LaneParameters, axis: LaneAxis) -> Forward:
    """Return the forward of a module that computes each token by itself: lane after lane of tokens."""

    def lane_forward(x: Tensor) -> Tensor:
        outputs = []
        chunks = SplitChunks.apply(x, axis.lanes, TOKENS)
        for chunk, tensors in zip(chunks, parts.by_lane(), strict=True):
            with computing_with(parts.owners, tensors):
                output = forward(chunk)
            outputs.append(output)
        # (batch, seq/tp, dim)
        return JoinChunks.apply(TOKENS, *outputs)

    return lane_forward


def _look_up(parts: LaneParameters, axis: LaneAxis) -> Forward:
    """Return the forward of an embedding: each lane looks up the tokens that are in its rows."""

    def lane_forward(tokens: Tensor) -> Tensor:
        terms = []
        for index, tensors in enumerate(parts.by_lane()):
            # (rows of a lane, dim)
            weight = tensors["weight"]
            lane = axis.first_lane + index
            rows = weight.shape[0]
            row, is_own = own_rows(tokens, lane * rows, rows)
            # (batch, seq, dim), zero where another lane has the token.
            vectors = functional.embedding(row, weight)
            vectors = vectors.masked_fill(~is_own[..., None], 0)
            terms.append(vectors)
        chunks = ScatterSum.apply(axis, TOKENS, *terms)
        return JoinChunks.apply(TOKENS, *chunks)

    return lane_forward


def _logits(
    forward: Forward,
    parts: LaneParameters,
    axis: LaneAxis,
    mesh: DeviceMesh | None,
) -> Forward:
    """Return the forward of the output matrix: each lane has logits of its rows of the vocabulary."""

    def lane_forward(x: Tensor) -> Tensor:
        logits = []
        chunks = SplitChunks.apply(x, axis.lanes, TOKENS)
        inputs = GatherLanes.apply(axis, TOKENS, *chunks)
        for lane_input, tensors in zip(inputs, parts.by_lane(), strict=True):
            with computing_with(parts.owners, tensors):
                # (batch, seq, vocab_size / T)
                lane_logits = forward(lane_input)
            logits.append(lane_logits)
        # (batch, seq, vocab_size / tp)
        own = JoinChunks.apply(-1, *logits)
        if mesh is None:
            return own
        return DTensor.from_local(own, mesh, [Shard(-1)], run_check=False)

    return lane_forward


class SumLanes(torch.autograd.Function):
    """Terms, one a lane → their sum over all lanes and ranks. Backward: each lane has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, axis: LaneAxis, *terms: Tensor) -> Tensor:  # type: ignore[override]
        ctx.lanes = len(terms)
        return axis.sum(terms)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, *(gradient.detach() for _ in range(ctx.lanes))


class LaneLoss:
    """`mmm.parallel.loss.cross_entropy` of logits whose vocabulary is in lanes.

    Args:
        axis: the lanes along tp.
    """

    def __init__(self, axis: LaneAxis) -> None:
        self.axis = axis

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        count: int | Tensor,
    ) -> Tensor:
        """
        Args:
            logits: (batch, seq, vocab); with several ranks a DTensor, sharded over the vocabulary.
            targets: (batch, seq) int64; `PADDING` where a token has none.
            count: number of targets in the global batch.
        """
        # (batch, seq, vocab / tp)
        own = to_local(logits)
        lanes = SplitChunks.apply(own, self.axis.lanes, -1)
        total = _CrossEntropy.apply(self.axis, targets, *lanes)
        return total / count


class _CrossEntropy(torch.autograd.Function):
    """Σ over the tokens with a target of (log Σ exp logits - the target's logit), with the vocabulary in lanes."""

    @staticmethod
    def forward(ctx: Any, axis: LaneAxis, targets: Tensor, *logits: Tensor) -> Tensor:  # type: ignore[override]
        has_target = targets != PADDING
        wide_dtype = torch.promote_types(logits[0].dtype, torch.float32)
        # (batch, seq, vocab_size / T) for each lane of this rank
        wide = [lane.to(wide_dtype) for lane in logits]
        # (batch, seq): the largest logit of each token. A maximum has no rounding.
        own_tops = torch.stack([lane.amax(-1) for lane in wide])
        # (ranks, lanes of a rank, batch, seq)
        tops = torch.stack(axis.all_gather(own_tops))
        top = tops.flatten(0, 1).amax(0)
        # Less the largest, so that no exponential is infinite.
        exponentials = [(lane - top[..., None]).exp() for lane in wide]
        # (batch, seq): summed over the whole vocabulary.
        lane_sums = [lane.sum(-1) for lane in exponentials]
        total = axis.sum(lane_sums)
        own_targets = []
        target_logits = []
        for index, lane in enumerate(wide):
            lane_index = axis.first_lane + index
            rows = lane.shape[-1]
            row, is_own = own_rows(targets, lane_index * rows, rows)
            own_targets.append((row, is_own))
            # (batch, seq), zero where another lane has the target.
            logit = lane.gather(-1, row[..., None])[..., 0]
            logit = logit.masked_fill(~is_own, 0)
            target_logits.append(logit)
        target_logit = axis.sum(target_logits)
        ctx.dtype = logits[0].dtype
        ctx.own_targets = own_targets
        ctx.save_for_backward(total, has_target, *exponentials)
        # (batch, seq)
        losses = total.log() + top - target_logit
        losses = losses.masked_fill(~has_target, 0)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        total, has_target, *exponentials = ctx.saved_tensors
        gradients = []
        for lane, (row, is_own) in zip(exponentials, ctx.own_targets, strict=True):
            # The softmax, minus 1 at the target.
            probabilities = lane / total[..., None]
            is_target = is_own[..., None].to(lane.dtype)
            probabilities.scatter_add_(-1, row[..., None], -is_target)
            probabilities = probabilities.masked_fill(~has_target[..., None], 0)
            lane_gradient = probabilities * gradient
            gradients.append(lane_gradient.to(ctx.dtype))
        return None, None, *gradients
