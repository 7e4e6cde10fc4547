"""Mixture of experts: a Transformer whose tokens choose their feed-forward networks, and experts spread over the ranks.

    launch python3 -m mmm.examples.moe --n_experts 8 --ep 2
    launch -n 2 --device cpu python3 -m mmm.examples.moe --ep 2 --break capacity

Each token goes through the --top_k of a layer's --n_experts networks that its router scores highest. On 4 ranks with
--ep 2 (``dp4·ep2``) ranks 0 and 1 share the experts, and so do 2 and 3. Each rank has samples of its own: 4 of 128
tokens, × 2 choices = 1024 rows. What rank 1 does in a layer, with numbers such as these::

    route        512 tokens score 8 experts, take 2 each                 no communication
    count        rows by expert: 130 120 140 110 │ 128 132 124 140       all-to-all with rank 0: 4 numbers each way
    all-to-all   500 rows of 64 numbers to rank 0: experts 0–3           524 stay; as many come as rank 0's tokens chose
    experts      4–7 compute 524 rows of rank 1 and, say, 490 of rank 0  no communication
    all-to-all   490 rows back to rank 0                                 500 come back
    weigh        each token: the sum of its 2 rows by their weights      no communication

So rank 1 sends 990 rows of 64 float32 = 253 kB in each of 2 layers, and in backward as much again: 1 MB a step. Before
each, FSDP gathers parameters (those of its last unit, 66 kB, once); after backward it reduce-scatters gradients:
(n-1)/n of their bytes. 983 kB of experts are sharded over [1 3]: 1.5 MB. All others, 235 kB, over 4 ranks: 0.5 MB.

No token is dropped: biases on the scores, moved by the all-reduced loads, lower ``imbalance``, the busiest load / mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.examples import _support as example
from mmm.examples._support import by_hand
from mmm.models.llama.model import TransformerConfig
from mmm.nn.experts import Experts
from mmm.parallel import Layout, balance_experts, cross_entropy, imbalance
from mmm.runtime.ranks import whoami
from mmm.torch_private.groups import all_to_all_single_autograd, wait_tensor


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.TensorParallelOptions, example.TextConfig):
    """A Transformer with routed experts, spread over --ep of the data-parallel ranks; × tensor parallel."""

    BREAKS: ClassVar = {
        "capacity": "an expert takes its even share of a rank's rows and drops the rest: those tokens lack an expert, "
        "and which they are depends on the mesh."
    }
    ep: int | None = None
    """Ranks that share the experts: a divisor of the data-parallel ranks. Default: 2 if they are even, else 1."""
    model: example.TransformerOptions = example.TransformerOptions(preset="debug")
    experts: example.ExpertOptions = example.ExpertOptions()

    def sizes(self) -> TransformerConfig:
        return replace(super().sizes(), **self.experts.sizes())

    def layout(self, ranks: int) -> Layout:
        ep = 2 - Layout(tp=self.tpsize).fit(ranks).dp_shard % 2 if self.ep is None else self.ep
        return Layout(tp=self.tpsize, ep=ep).fit(ranks)


def moe_layer(x: Tensor, router: Tensor, experts: list[Tensor], top_k: int, group: dist.ProcessGroup) -> Tensor:
    """A rank's tokens through experts that are spread over the ranks of `group`.

    Args:
        x: (tokens, dim). router: (n_experts, dim). experts: w1, w2, w3 of this rank's, (n_experts / ranks, …) each.
    """
    ranks, local = dist.get_world_size(group), len(router) // dist.get_world_size(group)
    # Route, then sort the choices by expert, and so by rank.
    weight, chosen = (x @ router.T).sigmoid().topk(top_k)  # (tokens, top_k) each
    weight = weight / weight.sum(1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)  # (tokens · top_k,): choice i is of token i // top_k
    # Count: how many rows go to each expert, and how many come from each rank for each expert here.
    outgoing = chosen.flatten().bincount(minlength=len(router))  # (n_experts,)
    incoming = torch.empty_like(outgoing)  # (ranks · local,)
    dist.all_to_all_single(incoming, outgoing, group=group)
    send, receive = (rows.view(ranks, local).sum(1).tolist() for rows in (outgoing, incoming))
    # All-to-all: rows to the ranks of their experts. Its backward is the all-to-all the other way.
    rows = wait_tensor(all_to_all_single_autograd(x[order // top_k], receive, send, group))
    # Experts: each computes the rows that came for it.
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(incoming)  # of each row
    done = torch.zeros_like(rows)
    for local_expert, (w1, w2, w3) in enumerate(zip(*experts, strict=True)):
        its = (expert == local_expert).nonzero().flatten()
        done = done.index_add(0, its, (F.silu(rows[its] @ w1.T) * (rows[its] @ w3.T)) @ w2.T)
    # All-to-all back. A token is the sum of its rows by their weights.
    back = wait_tensor(all_to_all_single_autograd(done, send, receive, group))  # (tokens · top_k, dim)
    return torch.zeros_like(x).index_add(0, order // top_k, weight.flatten()[order, None] * back)


def compare(run: example.Run) -> None:
    """`moe_layer` over all ranks beside the dense computation: 32 tokens and 2 experts a rank."""
    rank, ranks, dim, hidden = run.rank.rank, run.rank.world_size, 16, 24
    shapes = [(32, dim), (32, dim), (2, dim), (2, hidden, dim), (2, dim, hidden), (2, hidden, dim)]
    dy, *inputs = (x.requires_grad_() for x in by_hand.same_on_all_ranks(run, *((ranks, *shape) for shape in shapes)))
    x, router, *experts = (tensor.flatten(0, 1) for tensor in inputs)
    y = moe_layer(inputs[0][rank], router, [w[rank] for w in inputs[2:]], 2, dist.group.WORLD)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(y, inputs, dy[rank])
    for gradient in gradients:
        dist.all_reduce(gradient)  # each rank has a part of the sum
    expected = by_hand.dense_experts(x, router, experts, top_k=2)
    wanted = torch.autograd.grad(expected, inputs, dy.flatten(0, 1))
    by_hand.compare(run, [y, *gradients], [expected.view_as(dy)[rank], *wanted])


def drop(module: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
    """The mistake, as a hook on `Experts`: rows of an expert after its capacity are 0. They are sorted by expert."""
    count = inputs[1]  # (n_experts,): rows of each
    place = torch.arange(len(output), device=output.device) - (count.cumsum(0) - count).repeat_interleave(count)
    return output * (place < len(output) // len(count))[:, None]


def train(config: Config) -> None:
    job = example.resolve(config, config.layout(whoami().world_size), batch_size=4)
    model = job.model
    with example.start_run("moe", config, job) as run:
        compare(run)
        mesh = example.parallelize_by_package(run, job)  # training takes the package's layer
        for module in model.modules():
            if config.break_ == "capacity" and isinstance(module, Experts):
                module.register_forward_hook(drop)

        def local_loss(batch: Batch) -> Tensor:
            return cross_entropy(model(batch.inputs), batch.targets, batch.count)

        optimizer = config.optimizer.make(model.parameters())
        rate = 0.0 if config.break_ else config.experts.balance_rate  # one device's steps have the first biases
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            with loss_parallel():  # under tp the logits stay sharded over the vocabulary
                loss = local_loss(step.batch)
                step.log(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            load = balance_experts(model, mesh, rate)  # (layers, experts): tokens of all ranks
            step.row["imbalance"] = imbalance(load)
            if step.evaluates:
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, model)
        run.log.info("tokens of the last step, by layer and expert: %s", load.tolist())


if __name__ == "__main__":
    example.main(train, Config, __doc__)
