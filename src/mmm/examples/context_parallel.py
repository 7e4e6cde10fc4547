"""Context parallel: every sequence sharded over the ranks, for texts that are too long for one of them.

    launch python3 -m mmm.examples.context_parallel
    launch -n 2 --device cpu python3 -m mmm.examples.context_parallel --break positions

Along cp the ranks have the same samples, but other tokens of them: two chunks each, one from the head and one from the
tail, because later tokens have more to look back at; cp = 4, 512 tokens::

    a sequence     ┌────┬────┬────┬────┬────┬────┬────┬────┐
                   │ 0  │ 1  │ 2  │ 3  │ 3  │ 2  │ 1  │ 0  │    which rank has the chunk of 64 tokens
                   └────┴────┴────┴────┴────┴────┴────┴────┘
    all but attention      each rank its own 128 tokens, nothing to send
    attention, ring        hop 1, 2, 3: send the keys and values to the next rank, receive those of the rank before
                           rank 1 has keys of    hop 0: rank 1    hop 1: rank 0    hop 2: rank 3    hop 3: rank 2

`ring_attention` below is compared with attention to the full sequence on one rank. The training uses the package's,
which sends while it computes, and FSDP over dp × cp. Attention sharded over its heads, by all-to-alls (Ulysses):
``mmm.trainer.lm --cp 4 --cp_style ulysses``. Source: Liu et al., "Ring Attention with Blockwise Transformers",
2023.
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
    """Context parallel on a Transformer. The ranks that --cp and --tpsize leave are data parallel."""

    BREAKS: ClassVar = {
        "positions": "each rank counts its tokens from 0: tokens of different ranks then seem as near as those of one.",
        "triangle": "the ring attends to all keys that pass: a token then sees those after it, which it is to predict.",
    }
    cp: int | None = None
    """Ranks along cp: over how many each sequence is sharded. Default: all that --tpsize leaves."""
    model: example.TransformerOptions = example.TransformerOptions(preset="debug")
    data: example.PlainTextOptions = example.PlainTextOptions(seq_length=512)  # a multiple of 2 · cp · tp


class SendToNext(torch.autograd.Function):
    """To the next rank of the ring, in exchange for what the rank before sends; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, step: int = 1) -> Tensor:
        ctx.group, ctx.step = group, step
        ranks = dist.get_process_group_ranks(group)
        own = dist.get_rank(group)
        received = torch.empty_like(x)
        send = dist.P2POp(dist.isend, x.contiguous(), ranks[(own + step) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, received, ranks[(own - step) % len(ranks)], group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return SendToNext.apply(gradient, ctx.group, -ctx.step), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over some of the keys, and the logarithm of its sum of exponentials: (…, queries, head_dim), (…, 1)."""
    # -1e30, not -inf: a query that sees none of these keys merges with weight 0. (batch, heads, queries, keys)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -1e30)
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse) @ v, lse


def positions_of(rank: int, ranks: int, seq: int) -> Tensor:
    """The tokens that a rank has: one chunk from the head and one from the tail, (seq / ranks,)."""
    chunks = torch.arange(seq).tensor_split(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, causal: bool = True) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks: (batch, heads, seq / ranks, head_dim) each."""
    rank, ranks, wide = dist.get_rank(group), dist.get_world_size(group), torch.promote_types(q.dtype, torch.float32)
    kv = torch.stack((k, v)).to(wide)  # (2, batch, kv heads, seq / ranks, head_dim)
    query_positions = positions_of(rank, ranks, ranks * q.shape[2])
    out, lse = torch.zeros_like(q, dtype=wide), torch.full_like(q[..., :1], -math.inf, dtype=wide)  # of no keys
    for hop in range(ranks):
        if hop:
            kv = SendToNext.apply(kv, group)
        key_positions = positions_of((rank - hop) % ranks, ranks, ranks * q.shape[2])
        visible = (query_positions[:, None] >= key_positions).to(q.device)
        heads = kv.repeat_interleave(q.shape[1] // k.shape[1], dim=2)  # each serves several heads of q
        hop_out, hop_lse = attention(q.to(wide), heads[0], heads[1], visible if causal else torch.ones_like(visible))
        total = torch.logaddexp(lse, hop_lse)  # the softmax over both: each weighed by its sum of exponentials
        out, lse = out * torch.exp(lse - total) + hop_out * torch.exp(hop_lse - total), total
    return out.to(q.dtype)


def train(config: Config) -> None:
    cp = example.fit(tp=config.tpsize).dp_shard if config.cp is None else config.cp
    layout = example.fit(tp=config.tpsize, cp=cp)
    job = example.resolve(config, layout, batch_size=1)
    model = job.model
    with example.start_run("context_parallel", config, job) as run:
        ring, world = partial(ring_attention, group=dist.group.WORLD), run.rank.world_size  # type: ignore[arg-type]
        by_hand.compare_attention(run, ring, positions_of(run.rank.rank, world, 8 * world))
        mesh = example.parallelize_by_package(run, job)
        for layer in model.layers.values() if config.break_ == "triangle" and layout.cp > 1 else ():
            layer.attention.attention_fn = partial(ring_attention, group=mesh["cp"].get_group(), causal=False)  # type: ignore

        # Which tokens this rank has, and where they stand in the full sequence: the model cannot count from 0.
        coordinate = layout.coordinates(run.rank.rank)["cp"]
        own_positions = positions_of(coordinate, layout.cp, config.data.seq_length).to(run.device)
        positions = own_positions if config.break_ != "positions" else torch.arange(len(own_positions)).to(run.device)

        def local_loss(batch: Batch) -> Tensor:
            logits = model(batch.inputs[:, own_positions], positions)
            return cross_entropy(logits, batch.targets[:, own_positions], batch.count)

        optimizer = config.optimizer.make(model.parameters())
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            with loss_parallel():  # under tp the logits stay sharded over the vocabulary
                loss = local_loss(step.batch)
                step.log(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.evaluates:
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, model)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
