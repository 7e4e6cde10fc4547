"""Context parallel: every sequence sharded over the ranks, for texts that are too long for one of them.

    launch python3 -m mmm.examples.context_parallel
    launch -n 4 --device cpu python3 -m mmm.examples.context_parallel --cp_style ulysses
    launch -n 2 --device cpu python3 -m mmm.examples.context_parallel --break positions

Along cp the ranks have the same samples, but different tokens of them: two chunks each, one from the head and one from
the tail, because later tokens have more to look back at; cp = 4, 512 tokens::

    a sequence     ┌────┬────┬────┬────┬────┬────┬────┬────┐
                   │ 0  │ 1  │ 2  │ 3  │ 3  │ 2  │ 1  │ 0  │    which rank has the chunk of 64 tokens
                   └────┴────┴────┴────┴────┴────┴────┴────┘
    all but attention      each rank its own 128 tokens, nothing to send
    attention, ring        hop 1, 2, 3: send the keys and values held to the next rank, take those of the rank before
                           rank 1 has keys of    hop 0: rank 1    hop 1: rank 0    hop 2: rank 3    hop 3: rank 2
    attention, ulysses     all-to-all: each rank gets the full sequence of heads / cp heads; and back

`ring_attention` writes the ring out for one layer, and is compared with attention to the full sequence. The model then
trains with the package's ring, which sends while it computes. Parameters are sharded over dp × cp together (FSDP).
The losses are those of one device, whatever the style and the mesh.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.parallel import Layout, apply, build_mesh, cross_entropy, materialize
from mmm.runtime.failure import run_main
from mmm.runtime.process_group import gather_floats
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.needs import CUT_SEQUENCE, Need, check_needs
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import BreakOptions, Preset, Unused, parse
from mmm.trainer.report import print_once, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.steps import text_steps
from mmm.trainer.text import TextProgramOptions, ValidationOptions, resolve


@dataclass(frozen=True, kw_only=True)
class Config(BreakOptions, TextProgramOptions, ValidationOptions):
    """Context parallel on a Transformer. The ranks that --cp and --tpsize leave are data parallel."""

    NEEDS: ClassVar[dict[str, Need]] = {"cp_style": CUT_SEQUENCE}
    BREAKS: ClassVar = {
        "positions": "each rank counts its tokens from 0. The model turns queries and keys by their positions in the "
        "full sequence: tokens of different ranks then seem as near as those of one.",
        "triangle": "the ring attends to all keys that pass. A token then sees those after it, and learns to copy the "
        "next one: the loss falls too fast, and the model is useless.",
    }
    cp: int | None = None
    """Ranks along cp: over how many each sequence is sharded. Default: all that --tpsize leaves."""
    cp_style: Literal["ring", "ulysses"] | None = None
    """ring: keys and values go round. ulysses: attention is sharded over its heads, which cp · tp has to divide.
    Default: ring."""
    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is sharded."""
    preset: Preset = "debug"
    """Sizes to start from: small ones, so that long sequences are quick without an accelerator."""
    seq_length: int = 512
    """Tokens a sample: a multiple of 2 · cp · tp."""
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    compile: Unused[bool] = False

    def layout(self, ranks: int) -> Layout:
        """The mesh for that many ranks."""
        cp = Layout(tp=self.tpsize).fit(ranks).dp_shard if self.cp is None else self.cp
        layout = Layout(cp=cp, tp=self.tpsize).fit(ranks)
        check_needs(self, layout)
        return layout


class SendToNext(torch.autograd.Function):
    """To the next rank of the ring, in exchange for what the rank before sends; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, step: int = 1) -> Tensor:
        ctx.group, ctx.step = group, step
        ranks, received = dist.get_process_group_ranks(group), torch.empty_like(x)
        at = dist.get_rank(group)
        send = dist.P2POp(dist.isend, x.contiguous(), ranks[(at + step) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, received, ranks[(at - step) % len(ranks)], group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return SendToNext.apply(gradient, ctx.group, -ctx.step), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over some of the keys, and the logarithm of its sum of exponentials: (…, queries, head_dim), (…, 1)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (batch, heads, queries, keys)
    scores = scores.masked_fill(~visible, -1e30)  # not -inf: a query that sees none of these keys merges with weight 0
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse) @ v, lse


def positions_of(rank: int, ranks: int, seq: int) -> Tensor:
    """The tokens that a rank has: one chunk from the head and one from the tail, (seq / ranks,)."""
    chunks = torch.arange(seq).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, triangle: bool = True) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks: (batch, heads, seq / ranks, head_dim) each."""
    rank, ranks, wide = dist.get_rank(group), dist.get_world_size(group), torch.promote_types(q.dtype, torch.float32)
    kv = torch.stack((k, v)).to(wide)  # (2, batch, kv heads, seq / ranks, head_dim)
    mine = positions_of(rank, ranks, ranks * q.shape[2])
    for hop in range(ranks):
        if hop:
            kv = SendToNext.apply(kv, group)
        theirs = positions_of((rank - hop) % ranks, ranks, ranks * q.shape[2])
        visible = mine[:, None] >= theirs if triangle else torch.ones(len(mine), len(mine), dtype=torch.bool)
        heads = kv.repeat_interleave(q.shape[1] // k.shape[1], dim=2)  # each serves several heads of q
        part, part_lse = attention(q.to(wide), *heads, visible.to(q.device))
        if not hop:
            out, lse = part, part_lse
            continue
        total = torch.logaddexp(lse, part_lse)  # the softmax over both: each weighed by its sum of exponentials
        out, lse = out * torch.exp(lse - total) + part * torch.exp(part_lse - total), total
    return out.to(q.dtype)


def compare(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference, of output and gradients, of the ring from attention to the full sequence."""
    torch.manual_seed(0)
    ranks = dist.get_world_size(group)
    mine = positions_of(dist.get_rank(group), ranks, 8 * ranks)
    full = torch.randn(4, 2, 4, 8 * ranks, 16).to(device, dtype)  # q, k, v, dy: (batch, heads, seq, head_dim)

    def output_and_gradients(attend: Callable[..., Tensor], qkv_dy: Tensor) -> Tensor:
        q, k, v = (t.clone().requires_grad_() for t in qkv_dy[:3])
        y = attend(q, k, v)
        return torch.stack((y, *torch.autograd.grad(y, (q, k, v), qkv_dy[3])))

    expected = output_and_gradients(partial(F.scaled_dot_product_attention, is_causal=True), full)[..., mine, :]
    found = output_and_gradients(partial(ring_attention, group=group), full[..., mine, :])
    return max(gather_floats([float((found - expected).abs().max() / expected.abs().max())], device))[0]


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    layout, style = config.layout(whoami().world_size), config.cp_style or "ring"
    resolved = resolve(config, layout, default_batch=1, cp_style=style)
    model = resolved.model
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("context_parallel", config, layout, resolved.about_data, footprint(model, config.optimizer)) as run:
        run.log.info("model, whole:\n%s", resolved.summary())
        difference = compare(dist.group.WORLD, run.device, run.precision.storage)
        run.log.info("a ring of %d ranks by hand: differs from the full sequence by %.1e", layout.ranks, difference)
        run.describe(**resolved.describe(), by_hand_difference=difference)
        mesh = build_mesh(layout, run.device.type, config.timeout)
        apply(model, mesh, resolved.plan, run.precision, cp_style=style)
        materialize(model, run.device, config.seed)
        run.log.info("%s\n%s", mesh, sharded_model(model))
        for layer in model.layers.values() if config.break_ == "triangle" and layout.cp > 1 else ():
            layer.attention.attention_fn = partial(ring_attention, group=mesh["cp"].get_group(), triangle=False)

        # Which tokens this rank has, and where they stand in the full sequence: the model cannot count from 0.
        mine = positions_of(layout.coordinates(run.rank.rank)["cp"], layout.cp, config.seq_length).to(run.device)
        positions = mine if config.break_ != "positions" else torch.arange(len(mine), device=run.device)

        def local_loss(batch: Batch) -> Tensor:
            return cross_entropy(model(batch.inputs[:, mine], positions), batch.targets[:, mine], batch.count)

        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        for step in text_steps(run, resolved, model, optimizer, local_loss):
            with loss_parallel():  # under tp the logits stay sharded over the vocabulary
                loss = local_loss(step.batch)
                step.log(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
