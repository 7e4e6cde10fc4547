"""Mixture of experts: each token of a Transformer chooses its feed-forward networks, which are spread over the ranks.

    launch python3 -m mmm.examples.moe --n_experts 8 --ep 2
    launch -n 2 --device cpu python3 -m mmm.examples.moe --ep 2 --break capacity

In each layer a router scores the --n_experts networks for each token, and the token goes through the --top_k best. On 4
ranks with --ep 2 (``dp4·ep2``) ranks 0 and 1 share the experts, and so do 2 and 3. Each rank has its own samples: 4 of
128 tokens, × 2 choices = 1024 rows. This is what rank 1 does in a layer, with numbers as they may come out::

    route        512 tokens score 8 experts, take 2 each                 no communication
    count        rows by expert: 130 120 140 110 │ 128 132 124 140       all-to-all with rank 0: 4 numbers each way
    all-to-all   500 rows of 64 numbers to rank 0: experts 0–3           524 stay; as many come as rank 0's tokens chose
    experts      4–7 compute 524 rows of rank 1 and, say, 490 of rank 0  no communication
    all-to-all   490 rows back to rank 0                                 500 come back
    weigh        each token: the sum of its 2 rows by their weights      no communication

So rank 1 sends 990 rows of 64 float32 = 253 kB in each of 2 layers, and the same again in backward: 1 MB a step. Before
each forward and backward FSDP gathers parameters (those of its last unit, 66 kB, only once), and after backward it
reduce-scatters gradients, each (n-1)/n of their bytes. 983 kB of experts are sharded over 2 ranks, [1 3]: 1.5 MB. The
other 235 kB are sharded over 4 ranks: 0.5 MB.

No token is dropped. Instead each expert has a bias on its scores, moved by its load over all ranks, which lowers
``imbalance``: the load of the busiest expert over the mean load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.examples import _support as example
from mmm.examples._support import by_hand
from mmm.nn.experts import Experts
from mmm.parallel import Layout, balance_experts, cross_entropy, imbalance
from mmm.run.options import check_counts
from mmm.runtime.ranks import whoami
from mmm.torch_private.groups import all_to_all_single_autograd, wait_tensor


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.TensorParallelOptions, example.TextConfig):
    """A Transformer with routed experts, spread over --ep of the data-parallel ranks; × tensor parallel."""

    BREAKS: ClassVar = {
        "capacity": "An expert takes only its even share of a rank's tokens and drops the rest. The dropped tokens "
        "get nothing from this expert, and which tokens these are depends on the mesh.",
    }
    ep: int | None = None
    """Number of ranks that share the experts, a divisor of the data-parallel ranks. Default: 2 if those are even, else
    1."""
    model: example.Model = example.Model(preset="debug", n_experts=8)

    LEFT_OUT: ClassVar = example.LEFT_OUT

    def check(self) -> None:
        """Raises ConfigError without experts."""
        check_counts(n_experts=self.model.n_experts)

    def layout(self, ranks: int) -> Layout:
        ep = self.ep
        if ep is None:
            dp = Layout(tp=self.tpsize).fit(ranks).dp_shard
            ep = 2 - dp % 2
        return Layout(tp=self.tpsize, ep=ep).fit(ranks)


def moe_layer(
    x: Tensor,
    router: Tensor,
    experts: list[Tensor],
    top_k: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Send a rank's tokens through experts that are spread over the ranks of `group`. A collective of the group.

    Args:
        x: this rank's tokens, (tokens, dim).
        router: (n_experts, dim), the same on every rank.
        experts: w1, w2, w3 of this rank's experts, (n_experts / ranks, …) each.
    """
    ranks = dist.get_world_size(group)
    n_experts = len(router)
    n_local = n_experts // ranks

    # Route: (tokens, top_k) each. A token's weights sum to 1.
    weight, chosen = (x @ router.T).sigmoid().topk(top_k)
    weight = weight / weight.sum(1, keepdim=True)
    # Sort the choices by expert, and so by rank: (tokens · top_k,). Choice i belongs to token i // top_k.
    order = chosen.flatten().argsort(stable=True)
    token = order // top_k

    # Count. Nobody knows how many rows will come until all ranks have said how many they send to each expert:
    # outgoing (n_experts,) for all experts, incoming (ranks · n_local,) from each rank for each expert of this one.
    outgoing = chosen.flatten().bincount(minlength=n_experts)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    send = outgoing.view(ranks, n_local).sum(1).tolist()
    receive = incoming.view(ranks, n_local).sum(1).tolist()

    # All-to-all: rows travel to the ranks of their experts. Its backward is the all-to-all the other way.
    rows = wait_tensor(all_to_all_single_autograd(x[token], receive, send, group))

    # Experts: each computes the rows that came for it. Rows arrive sorted by rank, then by expert.
    expert_of_row = torch.arange(n_local, device=x.device).repeat(ranks).repeat_interleave(incoming)
    outputs = torch.zeros_like(rows)
    for local_expert, (w1, w2, w3) in enumerate(zip(*experts, strict=True)):
        own = (expert_of_row == local_expert).nonzero().flatten()
        # SwiGLU: (rows, hidden), then (rows, dim)
        hidden = F.silu(rows[own] @ w1.T) * (rows[own] @ w3.T)
        outputs = outputs.index_add(0, own, hidden @ w2.T)

    # All-to-all back: (tokens · top_k, dim), in the order in which this rank sent them.
    back = wait_tensor(all_to_all_single_autograd(outputs, send, receive, group))
    # Weigh: a token is the sum of its rows by their weights.
    row_weight = weight.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, row_weight * back)


def compare(run: example.Run) -> None:
    """Compare `moe_layer` over all ranks with the dense computation: 32 tokens and 2 experts a rank. A collective."""
    rank = run.rank.rank
    ranks = run.rank.world_size
    dim = 16
    hidden = 24
    # dy, x, router, w1, w2, w3 of one rank
    shapes = [(32, dim), (32, dim), (2, dim), (2, hidden, dim), (2, dim, hidden), (2, hidden, dim)]
    # All ranks draw the tensors of all ranks: (ranks, *shape) each.
    dy, *inputs = by_hand.same_on_all_ranks(run, *((ranks, *shape) for shape in shapes))
    for tensor in inputs:
        tensor.requires_grad_()
    full_x, full_router, *full_experts = (tensor.flatten(0, 1) for tensor in inputs)
    own_x = inputs[0][rank]
    own_experts = [w[rank] for w in inputs[2:]]
    y = moe_layer(own_x, full_router, own_experts, 2, dist.group.WORLD)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(y, inputs, dy[rank])
    for gradient in gradients:
        # Each rank has the gradient of its own tokens: a summand.
        dist.all_reduce(gradient)

    dense_y = by_hand.dense_experts(full_x, full_router, full_experts, top_k=2)
    dense_gradients = torch.autograd.grad(dense_y, inputs, dy.flatten(0, 1))
    by_hand.compare(run, [y, *gradients], [dense_y.view_as(dy)[rank], *dense_gradients])


def drop_rows_over_capacity(module: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
    """The mistake, as a forward hook of `Experts`: rows of an expert that exceed its even share become 0.

    Args:
        inputs: the rows, (rows, dim), sorted by expert; and how many each expert has, (n_experts,).
        output: (rows, dim).
    """
    count = inputs[1]
    capacity = len(output) // len(count)
    first_row = count.cumsum(0) - count
    # (rows,): the place of each row among the rows of its expert.
    place = torch.arange(len(output), device=output.device) - first_row.repeat_interleave(count)
    return output * (place < capacity)[:, None]


def train(config: Config) -> None:
    job = example.resolve(config, config.layout(whoami().world_size), batch_size=4)
    model = job.model
    with example.start_run("moe", config, job) as run:
        compare(run)
        # Training takes the package's layer.
        mesh = example.parallelize_by_package(run, job)
        if config.break_ == "capacity":
            for module in model.modules():
                if isinstance(module, Experts):
                    module.register_forward_hook(drop_rows_over_capacity)

        def local_loss(batch: Batch) -> Tensor:
            return cross_entropy(model(batch.inputs), batch.targets, batch.count)

        optimizer = config.optimizer.make(model.parameters())
        # The one device that a mistake is compared with does not move its biases.
        balance_rate = 0.0 if config.break_ else config.model.balance()
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            # Under tp the logits stay sharded over the vocabulary.
            with loss_parallel():
                loss = local_loss(step.batch)
                step.log(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # (layers, experts): tokens of all ranks, by an all-reduce. Then each bias moves a little.
            load = balance_experts(model, mesh, balance_rate)
            step.row["imbalance"] = imbalance(load)
            if step.evaluates:
                step.row["val_loss"] = example.validation_loss(run, job, local_loss, model)
        run.log.info("tokens of the last step, by layer and expert: %s", load.tolist())


if __name__ == "__main__":
    example.main(train, Config, __doc__)
