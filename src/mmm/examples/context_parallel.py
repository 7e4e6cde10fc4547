"""Context parallel: every sequence is sharded over the ranks, for texts that are too long for one of them.

    launch python3 -m mmm.examples.context_parallel
    launch -n 2 --device cpu python3 -m mmm.examples.context_parallel --break positions

Along cp the ranks have the same samples, and each has a different part of their tokens. That part is two chunks, one
from the start and one from the end of the sequence: later tokens have more to look back at, so this gives all ranks the
same work. With cp = 4 and 512 tokens::

    a sequence     ┌────┬────┬────┬────┬────┬────┬────┬────┐
                   │ 0  │ 1  │ 2  │ 3  │ 3  │ 2  │ 1  │ 0  │    which rank has the chunk of 64 tokens
                   └────┴────┴────┴────┴────┴────┴────┴────┘
    all but attention      each rank computes its own 128 tokens, and sends nothing
    attention, ring        hop 1, 2, 3: pass the keys and values that came last on to the next rank
                           rank 1 has keys of    hop 0: rank 1    hop 1: rank 0    hop 2: rank 3    hop 3: rank 2

The example first compares `ring_attention`, written out below, with attention to the full sequence on one rank. Then it
trains with the package's ring attention, which sends while it computes, and with FSDP over dp × cp. For attention that
is sharded over its heads, by all-to-alls (Ulysses), see ``mmm.trainer.lm --cp 4 --cp_style ulysses``.

Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.examples import _support as example
from mmm.examples._support import by_hand
from mmm.parallel import cross_entropy


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.TensorParallelOptions, example.TextConfig):
    """Context parallel on a Transformer. The ranks that --cp and --tp leave are data parallel."""

    BREAKS: ClassVar = {
        "positions": "Each rank counts its tokens from 0, so tokens of different ranks get the same positions.",
        "triangle": "The causal mask (a triangle) is left out: the ring attends to all keys that pass, so a token "
        "sees those after it, which it has to predict.",
    }
    cp: int | None = None
    """Number of ranks along cp, over which each sequence is sharded. Default: all that --tp leaves."""
    model: example.Model = example.Model(preset="debug")
    # Each rank has two chunks, and tp shards them once more: seq_length is a multiple of 2 · cp · tp.
    data: example.Text = example.Text(seq_length=512)


class SendToNext(torch.autograd.Function):
    """Send a tensor around the ring, and receive one. Its gradient goes the other way.

    An offset of 1 sends to the next rank and receives from the one before; -1 does the opposite.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, offset: int = 1) -> Tensor:
        ctx.group = group
        ctx.offset = offset
        # torch.distributed addresses a message by the rank in the world, not in the group.
        ranks = dist.get_process_group_ranks(group)
        own = dist.get_rank(group)
        to_rank = ranks[(own + offset) % len(ranks)]
        from_rank = ranks[(own - offset) % len(ranks)]
        received = torch.empty_like(x)
        send = dist.P2POp(dist.isend, x.contiguous(), to_rank, group)
        receive = dist.P2POp(dist.irecv, received, from_rank, group)
        # Both at once: if every rank first sent and then received, all could wait for each other.
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # One gradient for each argument of forward: group and offset have none.
        return SendToNext.apply(gradient, ctx.group, -ctx.offset), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to a part of the keys, and the logarithm by which it can be merged with attention to other keys.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, heads, keys, head_dim).
        visible: (queries, keys) bool, whether a query may see a key.

    Returns:
        The softmax-weighted sum of v, (batch, heads, queries, head_dim), and the logarithm of the softmax's
        denominator, its sum of exponentials, (batch, heads, queries, 1).
    """
    # (batch, heads, queries, keys)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    # Not -inf, which would give NaN for a query that sees none of these keys. With -1e30 it merges with weight 0.
    scores = scores.masked_fill(~visible, -1e30)
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse) @ v, lse


def positions_of(rank: int, ranks: int, seq: int) -> Tensor:
    """The tokens that a rank has, one chunk from the start and one from the end: (seq / ranks,) int64."""
    chunks = torch.arange(seq).tensor_split(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    causal: bool = True,
) -> Tensor:
    """Causal attention of this rank's tokens to the tokens of all ranks. A collective of the group.

    Args:
        q: (batch, heads, seq / ranks, head_dim), as is what it returns.
        k, v: (batch, kv heads, seq / ranks, head_dim).
    """
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    seq = ranks * q.shape[2]
    # Many small terms are added up, so all of this is computed in float32 at least.
    wide = torch.promote_types(q.dtype, torch.float32)
    # One message for both: (2, batch, kv heads, seq / ranks, head_dim)
    kv = torch.stack((k, v)).to(wide)
    query_positions = positions_of(rank, ranks, seq)
    # Attention to no keys yet: the output and the sum of exponentials are 0. lse is the logarithm of that sum.
    out = torch.zeros_like(q, dtype=wide)
    lse = torch.full_like(q[..., :1], -math.inf, dtype=wide)
    for hop in range(ranks):
        if hop:
            kv = SendToNext.apply(kv, group)
        # Each hop moves keys and values on by one rank, so these come from the rank that is `hop` places before.
        key_positions = positions_of((rank - hop) % ranks, ranks, seq)
        visible = (query_positions[:, None] >= key_positions).to(q.device)
        if not causal:
            visible = torch.ones_like(visible)
        # Grouped-query attention: each key/value head, dim 2 of kv, serves several heads of q.
        keys, values = kv.repeat_interleave(q.shape[1] // k.shape[1], dim=2)
        hop_out, hop_lse = attention(q.to(wide), keys, values, visible)
        # Add this hop to the hops before: each output is weighted by its share of the sum of exponentials.
        total = torch.logaddexp(lse, hop_lse)
        out = out * torch.exp(lse - total) + hop_out * torch.exp(hop_lse - total)
        lse = total
    return out.to(q.dtype)


def train(config: Config) -> None:
    cp = config.cp
    if cp is None:
        # The ranks that tp leaves would be data parallel. All of them go to cp instead.
        cp = example.fit(tp=config.tpsize).dp_shard
    layout = example.fit(tp=config.tpsize, cp=cp)
    job = example.resolve(config, layout, batch_size=1)
    model = job.model
    with example.start_run("context_parallel", config, job) as run:
        # Before training, check the ring attention above, on a ring of all ranks.
        world_size = run.rank.world_size
        ring = partial(ring_attention, group=dist.group.WORLD)  # type: ignore[arg-type]
        by_hand.compare_attention(run, ring, positions_of(run.rank.rank, world_size, 8 * world_size))

        mesh = example.parallelize_by_package(run, job)
        if config.break_ == "triangle" and layout.cp > 1:
            for layer in model.layers.values():
                not_causal = partial(ring_attention, group=mesh["cp"].get_group(), causal=False)
                layer.attention.attention_fn = not_causal  # type: ignore[union-attr]

        # The positions of this rank's tokens in the full sequence. The model's rotary embedding needs them: left to
        # itself, it counts the tokens that it is given from 0.
        coordinate = layout.coordinates(run.rank.rank)["cp"]
        own_positions = positions_of(coordinate, layout.cp, config.data.seq_length).to(run.device)
        positions = own_positions
        if config.break_ == "positions":
            positions = torch.arange(len(own_positions)).to(run.device)

        def local_loss(batch: Batch) -> Tensor:
            # (batch, seq / cp): all ranks of cp read the same samples, and each takes its own tokens. The sum of its
            # losses is divided by the number of targets of the global batch, so those of all ranks add up.
            logits = model(batch.inputs[:, own_positions], positions)
            return cross_entropy(logits, batch.targets[:, own_positions], batch.count)

        optimizer = config.optimizer.make(model.parameters())
        # Name the objects that training changes. The run's record begins here.
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            # Under tp the logits stay sharded over the vocabulary.
            with loss_parallel():
                loss = local_loss(step.batch)
                step.log(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.evaluates:
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, model)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
