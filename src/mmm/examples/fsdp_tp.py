"""Two-dimensional parallelism: FSDP × tensor parallel, on a Llama-style Transformer.

    launch python3 -m mmm.examples.fsdp_tp --tpsize 4

N ranks stand on a mesh of dp × tp. Along tp (a row) the ranks work on the *same* samples, and each matrix is cut over
them. Along dp (a column) they have *different* samples, and what tensor parallel left of each matrix is cut once more::

                        tp: same samples, matrices cut
                   ┌────────┬────────┬────────┬────────┐
       dp:         │ rank 0 │ rank 1 │ rank 2 │ rank 3 │   samples 0 … b-1       host 1
       different   ├────────┼────────┼────────┼────────┤
       samples     │ rank 4 │ rank 5 │ rank 6 │ rank 7 │   samples b … 2b-1      host 2
                   └────────┴────────┴────────┴────────┘
                     FSDP along each column: [0, 4] [1, 5] [2, 6] [3, 7]

tp talks in every layer, forward and backward, and so keeps to neighbours; FSDP gathers a layer while the one before is
being worked out, and can go between hosts. Same seed and same global batch give the same losses on every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from torch.distributed.tensor.parallel import loss_parallel

from mmm.parallel import Layout, apply, build_mesh, check_compile, loss_of, materialize
from mmm.parallel.assemble import Techniques
from mmm.parallel.grad_scaler import GradScaler
from mmm.parallel.memory.offload import moved_text
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import MemoryOptions, parse
from mmm.trainer.report import print_once, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.text import TextProgramOptions, ValidationOptions, resolve, validate


@dataclass(frozen=True, kw_only=True)
class Config(TextProgramOptions, MemoryOptions, ValidationOptions):
    """FSDP × tensor parallel on a Transformer. The ranks that --tpsize leaves are data parallel."""

    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is cut."""


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    layout = Layout(tp=config.tpsize).fit(whoami().world_size)
    resolved = resolve(config, layout, default_batch=16)
    config.check_memory(config.seq_length // layout.tp, config.dtype)
    if config.compile:
        check_compile(resolved.plan, layout)
    model, batch, global_batch, steps = resolved.model, resolved.batch, resolved.global_batch, resolved.steps
    if config.summary:
        print_once(resolved.summary())
        return

    holds = footprint(model, config.optimizer, Techniques(offload=config.offload))
    with start_run("fsdp_tp", config, layout, resolved.about_data, holds) as run:
        run.log.info("model, whole:\n%s", resolved.summary())
        run.describe(**resolved.describe())

        # mesh -> plan -> weights: cut the shapes first, then give each rank memory and weights for its own part.
        mesh = build_mesh(layout, run.device.type, config.timeout)
        apply(model, mesh, resolved.plan, run.precision, compile=config.compile, **config.memory())
        materialize(model, run.device, config.seed)
        loss_fn = loss_of(model)  # cross-entropy of the logits, or in chunks
        run.log.info("%s\n%s", mesh, sharded_model(model))

        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        mine = layout.dp_coordinate(run.rank.rank) * batch  # this rank's first sample of each global batch
        run.log.info("%d steps of %d × %d tokens", steps, global_batch, config.seq_length)
        for step in range(steps):
            run.clock.start()
            part = resolved.tokens.batch(step, global_batch, mine, batch).to(run.device)
            run.clock.lap("dtd")
            with loss_parallel():  # the logits stay cut over the vocabulary
                loss = loss_fn(model(part.inputs), part.targets, part.count)
                run.clock.lap("dtf")
                scaler.scale(loss).backward()
            run.clock.lap("dtb")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.clock.lap("dto")

            last = step == steps - 1
            more = {}
            if config.validates(step, steps):
                more["val_loss"] = validate(
                    run,
                    resolved,
                    config.eval_batches,
                    lambda part: loss_fn(model(part.inputs), part.targets, part.count),
                )
            run.step(step, loss, samples=global_batch, tokens=part.count, last=last, **more)
        if config.offload:
            run.log.info("%s", moved_text(model, optimizer, run.device))


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
