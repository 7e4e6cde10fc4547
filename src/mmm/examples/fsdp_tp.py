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

from torch.distributed.tensor.parallel import loss_parallel

from mmm.parallel import apply, build_mesh, loss_of, materialize
from mmm.parallel.grad_scaler import GradScaler
from mmm.parallel.memory.offload import moved_text
from mmm.runtime.failure import run_main
from mmm.trainer.layout import MemoryOptions, TensorParallelOptions
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import parse
from mmm.trainer.report import print_once, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.text import TextProgramOptions, ValidationOptions, resolve, validate


@dataclass(frozen=True, kw_only=True)
class Config(TensorParallelOptions, TextProgramOptions, MemoryOptions, ValidationOptions):
    """FSDP × tensor parallel on a Transformer. The ranks that --tpsize leaves are data parallel."""


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    resolved = resolve(config)
    layout = resolved.layout
    model, steps = resolved.model, resolved.steps
    batch, global_batch = resolved.local_batch_size, resolved.global_batch_size
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("fsdp_tp", config, resolved) as run:
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
            part = resolved.data.train.batch(step, global_batch, mine, batch).to(run.device)
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
