"""Context parallel: every sequence cut over the ranks, for texts that are too long for one of them.

    launch python3 -m mmm.examples.context_parallel
    launch -n 4 --device cpu python3 -m mmm.examples.context_parallel --cp_style ulysses

N ranks stand on a mesh of dp × cp × tp. Along cp the ranks have the same samples, but different tokens of them: two
chunks each, one from the head and one from the tail, because later tokens have more to look back at; cp = 4::

    a sequence     ┌────┬────┬────┬────┬────┬────┬────┬────┐
                   │ 0  │ 1  │ 2  │ 3  │ 3  │ 2  │ 1  │ 0  │    which rank holds the chunk
                   └────┴────┴────┴────┴────┴────┴────┴────┘
    all but attention         each rank its own tokens, nothing to send
    attention, ring           keys and values go from rank to rank, cp - 1 times, while each attends to what is there
    attention, ulysses        all-to-all: each rank gets the whole sequence of heads / cp heads; and back

Parameters are cut over dp × cp together (FSDP), gradients are added up over both. Activations, which grow with the
sequence, are 1 / cp on each rank. The losses are those of one device, whatever the style and the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.parallel import Layout, apply, build_mesh, loss_of, materialize
from mmm.parallel.context.apply import shard_batch
from mmm.parallel.grad_scaler import GradScaler
from mmm.trainer.flags import run_main
from mmm.trainer.layout import MemoryOptions, TensorParallelOptions
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import SHARDED_SEQUENCE, Need, parse
from mmm.trainer.report import print_once, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.text import Preset, TextProgramOptions, ValidationOptions, resolve, validate


@dataclass(frozen=True, kw_only=True)
class Config(TensorParallelOptions, TextProgramOptions, MemoryOptions, ValidationOptions):
    """Context parallel on a Transformer. The ranks that --cp and --tpsize leave are data parallel."""

    NEEDS: ClassVar[dict[str, Need]] = {"cp_style": SHARDED_SEQUENCE}
    cp: int | None = None
    """Ranks along cp: over how many each sequence is cut. Default: all that --tpsize leaves."""
    cp_style: Literal["ring", "ulysses"] | None = None
    """ring: keys and values go round. ulysses: attention is cut over its heads, which cp · tp has to divide.
    Default: ring."""
    preset: Preset = "debug"
    """Sizes to start from: small ones, so that long sequences are quick without an accelerator."""
    seq_length: int = 512
    """Tokens a sample: a multiple of 2 · cp · tp."""

    default_batch_size = 1

    def axes(self, ranks: int) -> dict[str, int]:
        cp = Layout(tp=self.tpsize).fit(ranks).dp_shard if self.cp is None else self.cp
        return {"tp": self.tpsize, "cp": cp}


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    resolved = resolve(config)
    layout = resolved.layout
    model, plan, global_batch, steps = resolved.model, resolved.plan, resolved.global_batch_size, resolved.steps
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("context_parallel", config, resolved) as run:
        mesh = build_mesh(layout, run.device.type, config.timeout)
        apply(model, mesh, plan, run.precision, resolved.techniques)
        materialize(model, run.device, config.seed)
        loss_fn = loss_of(model)  # cross-entropy of the logits, or in chunks
        run.log.info("%s\n%s", mesh, sharded_model(model))

        def share(samples: Batch) -> Tensor:
            # Of the samples the tokens of this cp coordinate, and where they stand in the whole sequence, (seq / cp,):
            # the model turns heads by it, and cannot count from 0.
            part, positions = shard_batch(samples, layout.coordinates(run.rank.rank)["cp"], layout.cp)
            return loss_fn(model(part.inputs, positions), part.targets, part.count)

        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        mine = layout.dp_coordinate(run.rank.rank) * resolved.local_batch_size  # its first sample of each global batch
        run.log.info("%d steps of %d × %d tokens", steps, global_batch, config.seq_length)
        for step in range(steps):
            run.clock.start()
            samples = resolved.data.train.batch(step, global_batch, mine, resolved.local_batch_size).to(run.device)
            run.clock.lap("dtd")
            with loss_parallel():  # under tp the logits stay cut over the vocabulary
                loss = share(samples)
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
                more["val_loss"] = validate(run, resolved, config.eval_batches, share)
            run.step(step, loss, samples=global_batch, tokens=samples.count, last=last, **more)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
