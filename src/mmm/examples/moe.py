"""Mixture of experts: a Transformer whose tokens choose their feed-forward networks, and experts cut over the ranks.

    launch python3 -m mmm.examples.moe --n_experts 8 --ep 2

Every layer has --n_experts feed-forward networks; each token goes through the --top_k that its router scores highest:
many parameters, little work a token. On 4 ranks with --ep 2 (``dp4·ep2``) each rank has samples of its own::

       expert parallel, ep: neighbours        rank 0 ◄──── tokens ────► rank 1     experts 0–3 │ experts 4–7
       share the experts out, whole             │                         │
                                              FSDP: the same experts,   FSDP
                                              gradients added up          │
                                                │                         │
                                              rank 2 ◄──── tokens ────► rank 3     experts 0–3 │ experts 4–7

    in a layer    route: each token scores the experts        │ no communication
                  send: tokens to the ranks of their experts  │ all-to-all in [0 1] and [2 3], each time of other sizes
                  each expert works out what came to it       │ no communication
                  send back, add up by the router's weights   │ all-to-all

All other parameters are cut over all four ranks, as without ep. No token is dropped. ``imbalance`` is the load of the
busiest expert over the mean: a bias on each expert's score, moved after every step, brings it down without a second
loss. Same seed and same global batch give the same losses, loads and biases on every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import ConfigError
from mmm.parallel import Layout, apply, build_mesh, cross_entropy, materialize
from mmm.parallel.expert.balance import balance_experts, imbalance
from mmm.trainer.flags import run_main
from mmm.trainer.layout import TensorParallelOptions
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import parse
from mmm.trainer.report import print_once, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.text import ExpertOptions, Preset, TextProgramOptions, ValidationOptions, resolve, validate


@dataclass(frozen=True, kw_only=True)
class Config(TensorParallelOptions, ExpertOptions, TextProgramOptions, ValidationOptions):
    """A Transformer with routed experts, cut over --ep of the data-parallel ranks; × tensor parallel."""

    n_experts: int = 8
    """Experts in each layer."""
    ep: int | None = None
    """Ranks that share the experts out: a divisor of the data-parallel ranks. Default: 2 if they are even, else 1."""
    preset: Preset = "debug"
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"

    default_batch_size = 4

    def axes(self, ranks: int) -> dict[str, int]:
        ep = 2 - Layout(tp=self.tpsize).fit(ranks).dp_shard % 2 if self.ep is None else self.ep
        return {"tp": self.tpsize, "ep": ep}


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    if config.n_experts < 1:
        raise ConfigError(f"--n_experts {config.n_experts}: it must be at least 1")
    resolved = resolve(config)
    layout = resolved.layout
    model, steps = resolved.model, resolved.steps
    batch, global_batch = resolved.local_batch_size, resolved.global_batch_size
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("moe", config, resolved) as run:
        mesh = build_mesh(layout, run.device.type, config.timeout, experts=True)
        apply(model, mesh, resolved.plan, run.precision, resolved.techniques)
        materialize(model, run.device, config.seed)
        run.log.info("%s\n%s", mesh, sharded_model(model))

        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        mine = layout.dp_coordinate(run.rank.rank) * batch  # this rank's first sample of each global batch
        run.log.info("%d steps of %d × %d tokens", steps, global_batch, config.seq_length)
        for step in range(steps):
            run.clock.start()
            part = resolved.data.train.batch(step, global_batch, mine, batch).to(run.device)
            run.clock.lap("dtd")
            with loss_parallel():  # under tp the logits stay cut over the vocabulary
                loss = cross_entropy(model(part.inputs), part.targets, part.count)
                run.clock.lap("dtf")
                loss.backward()
            run.clock.lap("dtb")
            optimizer.step()
            optimizer.zero_grad()
            load = balance_experts(model, mesh, config.balance())  # (layers, experts): tokens of all ranks
            run.clock.lap("dto")

            last = step == steps - 1
            more = {"imbalance": imbalance(load)} if last or step % config.log_every == 0 else {}
            if config.validates(step, steps):
                more["val_loss"] = validate(
                    run,
                    resolved,
                    config.eval_batches,
                    lambda part: cross_entropy(model(part.inputs), part.targets, part.count),
                )
            run.step(step, loss, samples=global_batch, tokens=part.count, last=last, **more)
        run.log.info("tokens of the last step, by layer and expert: %s", load.tolist())


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
