"""An exact run with lanes along cp: every call of a layer has the tokens of one chunk of the sequence, on every mesh.

The sequence is split into 2 · C chunks, and lane c has chunks c and 2 · C - 1 - c, as `context_parallel` gives a rank
one of the head and one of the tail. A rank of a smaller cp has several lanes: its tokens are theirs, in the order of
the sequence. With C = 4 lanes on 2 ranks::

    chunk    0    1    2    3  │  4    5    6    7
    lane     0    1    2    3  │  3    2    1    0
    rank     0    0    1    1  │  1    1    0    0

A module without attention treats each token by itself, so it is called for each chunk. Each call has a copy of the
weights of its own, whose gradients are added up by the near tree: the two chunks of a lane, then lanes, then ranks.
Attention of a chunk's queries gets the keys and values from the beginning of the sequence to the end of the chunk: they
are gathered, in place of a ring, whose sums come in another order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.errors import ConfigError, config_field
from mmm.nn.attention import Documents, takes_grouped_heads
from mmm.nn.dropout import has_dropout
from mmm.parallel.cp.ulysses import join_shards, split_shards
from mmm.parallel.exact.lanes import FanOut, JoinChunks, LaneAxis, SplitChunks, computing_with
from mmm.parallel.exact.trees import sum_near
from mmm.parallel.mesh import Mesh
from mmm.parallel.plan import Plan, find
from mmm.parallel.ties import find_ties
from mmm.parallel.tp.replicated import Owners
from mmm.torch_private.module import own_parameters

# Copies of a parameter, one for each chunk of this rank, by the parameter's identity.
Copies = dict[int, tuple[Tensor, ...]]


def chunks_by_lane(lanes: int) -> list[int]:
    """Return the numbers of a rank's chunks, the two of each lane side by side: 0, 3, 1, 2 for two lanes."""
    order = []
    for lane in range(lanes):
        # One of the head of the sequence, and its mirror image of the tail.
        mirrored = 2 * lanes - 1 - lane
        order += [lane, mirrored]
    return order


def apply_sequence_lanes(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    lanes: int,
    compute: torch.dtype,
) -> None:
    """Have a model compute chunk by chunk of its sequence, in place.

    Args:
        lanes: number of lanes along cp, over all ranks.
        compute: data type that each chunk casts its weights to. Their gradients are summed in that of the weights.

    Raises:
        ConfigError: the model has no attention in its plan, or one that is not exact.
    """
    ranks = None
    if mesh.layout.cp > 1:
        ranks = mesh["cp"]
    axis = LaneAxis(lanes, ranks)
    attentions: list[nn.Module] = []
    for pattern in plan.attention:
        attentions += find(model, pattern)

    name = f"{config_field('exact')} with {lanes} lanes along cp"
    advice = "use 1 lane along cp"
    if not attentions:
        raise ConfigError(f"{name}: the plan of this model names no attention over a sequence; {advice}")
    for attention in attentions:
        if getattr(attention, "window", None) is not None:
            raise ConfigError(f"{name}: attention in a window is not exact; {advice}")
        if has_dropout(attention):
            raise ConfigError(f"{name}: dropout of attention's weights is not exact; {advice}")
        attention.attention_fn = LaneAttention(axis, attention.attention_fn)  # type: ignore

    tied: Copies | None = None
    if find_ties(model):
        # The modules that share a weight share its copies as well, so that the terms of a lane are added first.
        tied = {}
    attention_ids = {id(attention) for attention in attentions}
    _call_by_chunks(model, attention_ids, axis.lanes, compute, tied)
    if tied is not None:
        # Copies belong to the graph of one forward.
        model.register_forward_pre_hook(lambda *_: tied.clear())


def _call_by_chunks(
    module: nn.Module,
    attentions: set[int],
    lanes: int,
    compute: torch.dtype,
    tied: Copies | None,
) -> None:
    """Have the outermost modules without attention called chunk by chunk, in place.

    Args:
        attentions: the ids of the modules of attention.
    """
    has_attention = any(id(inner) in attentions for inner in module.modules())
    if has_attention:
        own = [name for name, parameter in own_parameters(module).items() if parameter is not None]
        if own:
            field = config_field("exact")
            class_name = type(module).__name__
            raise ConfigError(
                f"{field} with several lanes along cp: {class_name} has attention inside, "
                f"and a parameter of its own, {own[0]}, that no chunk can have a copy of; use 1 lane along cp"
            )
        for child in module.children():
            _call_by_chunks(child, attentions, lanes, compute, tied)
    elif any(True for _ in module.parameters()):
        module.forward = ByChunks(module, lanes, compute, tied)  # type: ignore[assignment]


class ByChunks:
    """Calls a module's forward for each chunk of its input, with copies of its weights. In place of the forward.

    Attributes:
        module: the module, which treats each token by itself.
        forward: its own forward.
        order: the numbers of the chunks, as `chunks_by_lane` returns them.
        compute: data type of the copies.
        tied: copies of the present forward that other modules use as well. None where no weight is tied.
    """

    def __init__(
        self,
        module: nn.Module,
        lanes: int,
        compute: torch.dtype,
        tied: Copies | None,
    ) -> None:
        self.module = module
        self.forward = module.forward
        self.order = chunks_by_lane(lanes)
        self.compute = compute
        self.tied = tied

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        """
        Args:
            x: (batch, local seq, …).
            others: further arguments, the same for each chunk.

        Returns:
            (batch, local seq, …).
        """
        # The tokens that an evaluation sees at once decide no bit of the training.
        chunks: Sequence[Tensor] = [x]
        order = [0]
        if torch.is_grad_enabled():
            order = self.order
            chunks = SplitChunks.apply(x, len(order), 1)
        owners: Owners = {}
        copies = {}
        # Gradients of copies are added up once all chunks have had their backward.
        for name, parameter in self.module.named_parameters():
            path, _, own_name = name.rpartition(".")
            owners[name] = (self.module.get_submodule(path), own_name)
            copies[name] = self._copies(parameter, len(order))
        outputs: list[Any] = [None] * len(order)
        for place, chunk in enumerate(order):
            # Neighbours in the order of computation get neighbouring copies, so the near tree begins with a lane's two.
            weights = {name: of_chunks[place] for name, of_chunks in copies.items()}
            with computing_with(owners, weights):
                outputs[chunk] = self.forward(chunks[chunk], *others)
        return JoinChunks.apply(1, *outputs)

    def _copies(self, parameter: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return the copies of a parameter, one for each chunk, lane after lane."""
        key = id(parameter)
        if self.tied is not None and key in self.tied:
            return self.tied[key]
        copies: tuple[Tensor, ...] = FanOut.apply(parameter, count, None, self.compute)
        if self.tied is not None:
            self.tied[key] = copies
        return copies


class LaneAttention:
    """Causal attention, chunk after chunk, over keys and values gathered over cp. Replaces a model's attention.

    Attributes:
        axis: the lanes along cp.
        attention_fn: the model's own attention, for an evaluation on one rank of cp.
    """

    def __init__(self, axis: LaneAxis, attention_fn: Callable[..., Tensor]) -> None:
        self.axis = axis
        self.attention_fn = attention_fn

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """
        Args:
            q: (batch, heads, local seq, head_dim) of this rank's tokens.
            k, v: (batch, kv heads, local seq, head_dim) of this rank's tokens.
            documents: of the full sequences, as for `mmm.nn.attention.causal_attention`.

        Returns:
            (batch, heads, local seq, head_dim).
        """
        # As many lanes as in training, or, for an evaluation, one: what it sees at once decides no bit.
        lanes = self.axis.lanes
        if not torch.is_grad_enabled():
            if self.axis.size == 1:
                # An attention function need not take documents.
                if documents is None:
                    return self.attention_fn(q, k, v)
                return self.attention_fn(q, k, v, documents)
            lanes = 1
        count = 2 * lanes
        # Query heads for each head of keys and values.
        repeats = q.shape[1] // k.shape[1]
        is_grouped = repeats > 1 and takes_grouped_heads(q)
        queries = SplitChunks.apply(q, count, 2)
        keys = GatherToEnd.apply(self.axis, lanes, k)
        values = GatherToEnd.apply(self.axis, lanes, v)
        outputs = []
        for query, key, value in zip(queries, keys, values, strict=True):
            end = key.shape[2]
            # The queries are the last tokens of the keys.
            places = torch.arange(end, device=q.device)
            own = places[end - query.shape[2] :]
            # (queries, keys)
            visible = places <= own[:, None]
            if documents is not None:
                # (batch, queries, keys)
                is_same_document = places >= documents.start_of_token[:, own, None]
                # (batch, 1, queries, keys): for all heads.
                visible = (visible & is_same_document)[:, None]
            if repeats > 1 and not is_grouped:
                key = key.repeat_interleave(repeats, dim=1)
                value = value.repeat_interleave(repeats, dim=1)
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=visible,
                enable_gqa=is_grouped,
            )
            outputs.append(output)
        return JoinChunks.apply(2, *outputs)


class GatherToEnd(torch.autograd.Function):
    """A rank's keys, or values → for each of its chunks those from the beginning of the sequence to the chunk's end.

    Backward sums the chunks' gradients by the near tree, and sends each rank those of its tokens.
    """

    @staticmethod
    def forward(ctx: Any, axis: LaneAxis, lanes: int, x: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            lanes: number of lanes of this rank.
            x: (batch, heads, local seq, head_dim).
        """
        # (ranks, batch, heads, local seq, head_dim)
        full = torch.stack(axis.all_gather(x))
        # (batch, heads, seq, head_dim), in the order of the sequence
        full = join_shards(full)
        ctx.axis = axis
        ctx.lanes = lanes
        ctx.seq = full.shape[2]
        # The numbers of this rank's chunks in the full sequence: some at its head, as many at its tail.
        head = axis.rank * lanes
        tail = (2 * axis.size - 1 - axis.rank) * lanes
        chunks = [*range(head, head + lanes), *range(tail, tail + lanes)]
        # Tokens of a chunk.
        length = x.shape[2] // (2 * lanes)
        outputs = []
        for chunk in chunks:
            end = (chunk + 1) * length
            # In memory of its own, as `chunks_of` has it.
            outputs.append(full[:, :, :end].clone(memory_format=torch.contiguous_format))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        terms = []
        for chunk in chunks_by_lane(ctx.lanes):
            gradient = gradients[chunk]
            # No query of a chunk has seen what comes after it: (batch, heads, seq, head_dim) with zeros at the end.
            unseen = ctx.seq - gradient.shape[2]
            terms.append(F.pad(gradient, (0, 0, 0, unseen)))
        pieces = split_shards(sum_near(terms), ctx.axis.size)
        by_rank = ctx.axis.all_to_all(pieces)
        # None for `axis` and `lanes`.
        return None, None, sum_near(by_rank)
