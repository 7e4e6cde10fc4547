"""Mixture of experts: a Transformer whose tokens choose their feed-forward networks, and experts spread over the ranks.

    launch python3 -m mmm.examples.moe --n_experts 8 --ep 2
    launch -n 2 --device cpu python3 -m mmm.examples.moe --ep 2 --break capacity

Every layer has --n_experts feed-forward networks; each token goes through the --top_k that its router scores highest.
On 4 ranks with --ep 2 (``dp4·ep2``) ranks 0 and 1 share the experts, and so do 2 and 3. Each rank has samples of its
own: 4 of 128 tokens, 512 tokens × 2 choices = 1024 rows. What rank 1 does in a layer::

    route        512 tokens score 8 experts, take 2 each                 no communication
    count        its 1024 rows by expert, such as                        all-to-all with rank 0: 4 numbers each way
                 130 120 140 110 | 128 132 124 140
    all-to-all   500 rows of 64 numbers to rank 0: experts 0–3           524 stay; as many come as rank 0's tokens chose
    experts      4–7 compute 524 rows of rank 1 and, say, 490 of rank 0  no communication
    all-to-all   490 rows back to rank 0                                 500 come back
    weigh        each token: the sum of its 2 rows by their weights      no communication

so rank 1 sends 990 rows of 64 float32 = 253 kB, in backward as much again. Each layer does this; all other parameters
are sharded over all four ranks (FSDP), experts over [0 2] and [1 3], which have the same ones.

`moe_layer` writes that out for one layer, and is compared with the dense computation. The model then trains with the
package's. No token is dropped. ``imbalance`` is the load of the busiest expert over the mean: a bias on each expert's
score, moved after every step, lowers it without a second loss. Same seed and same global batch give the same losses,
loads and biases on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.errors import ConfigError
from mmm.models.experts import Experts
from mmm.parallel import Layout, apply, build_mesh, cross_entropy, materialize
from mmm.parallel.expert.apply import balance_experts, imbalance
from mmm.runtime.failure import run_main
from mmm.runtime.process_group import gather_floats
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import BreakOptions, ExpertOptions, Preset, Unused, parse
from mmm.trainer.report import print_once, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.steps import text_steps
from mmm.trainer.text import TextProgramOptions, ValidationOptions, resolve


@dataclass(frozen=True, kw_only=True)
class Config(BreakOptions, ExpertOptions, TextProgramOptions, ValidationOptions):
    """A Transformer with routed experts, spread over --ep of the data-parallel ranks; × tensor parallel."""

    BREAKS: ClassVar = {
        "capacity": "an expert takes no more rows of a rank than its even share, and drops the others: their tokens "
        "lack an expert. Which are dropped depends on who shares a rank, and so on the mesh.",
    }
    n_experts: int = 8
    """Experts in each layer."""
    ep: int | None = None
    """Ranks that share the experts: a divisor of the data-parallel ranks. Default: 2 if they are even, else 1."""
    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is sharded, but for the experts'."""
    preset: Preset = "debug"
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    compile: Unused[bool] = False

    def layout(self, ranks: int) -> Layout:
        """The mesh for that many ranks."""
        ep = 2 - Layout(tp=self.tpsize).fit(ranks).dp_shard % 2 if self.ep is None else self.ep
        return Layout(tp=self.tpsize, ep=ep).fit(ranks)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def moe_layer(x: Tensor, router: Tensor, experts: list[Tensor], top_k: int, group: dist.ProcessGroup) -> Tensor:
    """A rank's tokens through experts that are spread over the ranks of `group`.

    Args:
        x: (tokens, dim). router: (n_experts, dim). experts: w1, w2, w3 of this rank's, (n_experts / ranks, …) each.
    """
    ranks, n_experts = dist.get_world_size(group), len(router)
    # Route.
    scores = (x @ router.T).sigmoid()  # (tokens, n_experts)
    weight, chosen = scores.topk(top_k)  # (tokens, top_k) each
    weight = weight / weight.sum(1, keepdim=True)
    # Count: choices sorted by expert, and so by rank.
    order = chosen.flatten().argsort(stable=True)  # (tokens · top_k,): choice i is of token i // top_k
    outgoing = chosen.flatten().bincount(minlength=n_experts)  # (n_experts,): rows for each
    incoming = torch.empty_like(outgoing)  # (ranks · experts here,): rows from each rank for each
    dist.all_to_all_single(incoming, outgoing, group=group)
    send, receive = (rows.view(ranks, -1).sum(1).tolist() for rows in (outgoing, incoming))
    # All-to-all: rows to the ranks of their experts. Its backward is the all-to-all the other way.
    rows = wait_tensor(all_to_all_single_autograd(x[order // top_k], receive, send, group))
    # Experts: each computes the rows that came for it.
    done, local = torch.zeros_like(rows), n_experts // ranks
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(incoming)  # of each row
    for number in range(local):
        its = (expert == number).nonzero().flatten()
        done = done.index_add(0, its, swiglu(rows[its], *(w[number] for w in experts)))
    # All-to-all back, and each token's rows by their weights.
    back = wait_tensor(all_to_all_single_autograd(done, send, receive, group))  # (tokens · top_k, dim)
    return torch.zeros_like(x).index_add(0, order // top_k, weight.flatten()[order, None] * back)


def dense(x: Tensor, router: Tensor, experts: list[Tensor], top_k: int) -> Tensor:
    """The same on one device: all experts compute all tokens, with weight 0 for those that were not chosen."""
    scores = (x @ router.T).sigmoid()
    weight, chosen = scores.topk(top_k)
    weight = torch.zeros_like(scores).scatter(1, chosen, weight / weight.sum(1, keepdim=True))  # (tokens, n_experts)
    outputs = torch.stack([swiglu(x, *matrices) for matrices in zip(*experts, strict=True)], 1)
    return (weight[..., None] * outputs).sum(1)


def compare(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference, of output and gradients, between `moe_layer` over all ranks and `dense`. A collective."""
    rank, ranks, dim, hidden, local = dist.get_rank(), dist.get_world_size(), 16, 24, 2
    torch.manual_seed(0)
    x, dy = torch.randn(2, ranks, 32, dim)  # (ranks, tokens, dim) each
    shapes = [(ranks * local, *shape) for shape in ((dim,), (hidden, dim), (dim, hidden), (hidden, dim))]
    x, dy, router, *experts = (t.to(device, dtype) for t in (x, dy, *map(torch.randn, shapes)))
    own = slice(rank * local, (rank + 1) * local)
    leaves = [t.clone().requires_grad_() for t in (x[rank], router, *(w[own] for w in experts))]
    full = [t.clone().requires_grad_() for t in (x, router, *experts)]
    y = moe_layer(*leaves[:2], leaves[2:], 2, dist.group.WORLD)
    expected = dense(full[0].flatten(0, 1), full[1], full[2:], 2).view_as(x)
    found = [y, *torch.autograd.grad(y, leaves, dy[rank])]
    dist.all_reduce(found[2])  # the router is on all ranks: its gradients add up
    dx, drouter, *dexperts = torch.autograd.grad(expected, full, dy)
    wanted = [expected[rank], dx[rank], drouter, *(dw[own] for dw in dexperts)]
    apart = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]
    return max(max(row) for row in gather_floats(apart, device))


def drop(expert_forward: Callable[..., Tensor], x: Tensor, tokens_per_expert: Tensor, *weights: Tensor) -> Tensor:
    """The mistake: an expert's rows after its capacity give 0. x: (rows, dim), sorted by expert."""
    first = (tokens_per_expert.cumsum(0) - tokens_per_expert).repeat_interleave(tokens_per_expert)
    kept = torch.arange(len(x), device=x.device) - first < len(x) // len(tokens_per_expert)
    return expert_forward(x, tokens_per_expert, *weights) * kept[:, None]


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    if config.n_experts < 1:
        raise ConfigError(f"--n_experts {config.n_experts}: it must be at least 1")
    layout = config.layout(whoami().world_size)
    resolved = resolve(config, layout, default_batch=4)
    model = resolved.model
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("moe", config, layout, resolved.about_data, footprint(model, config.optimizer)) as run:
        difference = compare(run.device, run.precision.storage)
        run.log.info("a layer by hand over %d ranks: differs from the dense one by %.1e", layout.ranks, difference)
        run.describe(**resolved.describe(), by_hand_difference=difference)
        mesh = build_mesh(layout, run.device.type, config.timeout, experts=True)
        apply(model, mesh, resolved.plan, run.precision)
        materialize(model, run.device, config.seed)
        run.log.info("%s\n%s", mesh, sharded_model(model))
        if config.break_ == "capacity":
            for module in (module for module in model.modules() if isinstance(module, Experts)):
                module.expert_forward = partial(drop, module.expert_forward)

        def local_loss(batch: Batch) -> Tensor:
            return cross_entropy(model(batch.inputs), batch.targets, batch.count)

        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        rate = 0.0 if config.break_ else config.balance()  # one device's steps have the first biases
        for step in text_steps(run, resolved, model, optimizer, local_loss):
            with loss_parallel():  # under tp the logits stay sharded over the vocabulary
                loss = local_loss(step.batch)
                step.log(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            load = balance_experts(model, mesh, rate)  # (layers, experts): tokens of all ranks
            if step.due:
                step.row["imbalance"] = imbalance(load)
        run.log.info("tokens of the last step, by layer and expert: %s", load.tolist())


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
