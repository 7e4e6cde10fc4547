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
from typing import Annotated, ClassVar, Literal

import tyro
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.parallel import Layout, apply, build_mesh, check_compile, loss_of, materialize
from mmm.parallel.context.apply import shard_batch
from mmm.parallel.grad_scaler import GradScaler
from mmm.parallel.techniques import Techniques
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.flags import run_main
from mmm.trainer.needs import CUT_SEQUENCE, Need, check_needs
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import MemoryOptions, Preset, parse
from mmm.trainer.report import print_once, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.text import TextProgramOptions, ValidationOptions, resolve, validate


@dataclass(frozen=True, kw_only=True)
class Config(TextProgramOptions, MemoryOptions, ValidationOptions):
    """Context parallel on a Transformer. The ranks that --cp and --tpsize leave are data parallel."""

    NEEDS: ClassVar[dict[str, Need]] = {"cp_style": CUT_SEQUENCE}
    cp: int | None = None
    """Ranks along cp: over how many each sequence is cut. Default: all that --tpsize leaves."""
    cp_style: Literal["ring", "ulysses"] | None = None
    """ring: keys and values go round. ulysses: attention is cut over its heads, which cp · tp has to divide.
    Default: ring."""
    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is cut."""
    preset: Preset = "debug"
    """Sizes to start from: small ones, so that long sequences are quick without an accelerator."""
    seq_length: int = 512
    """Tokens a sample: a multiple of 2 · cp · tp."""

    def layout(self, ranks: int) -> Layout:
        """The mesh for that many ranks."""
        cp = Layout(tp=self.tpsize).fit(ranks).dp_shard if self.cp is None else self.cp
        layout = Layout(cp=cp, tp=self.tpsize).fit(ranks)
        check_needs(self, layout)
        return layout


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    layout = config.layout(whoami().world_size)
    cp_style = config.cp_style or "ring"
    resolved = resolve(config, layout, default_batch=1, cp_style=cp_style)
    config.check_memory(config.seq_length // (layout.cp * layout.tp), config.dtype)
    if config.compile:
        check_compile(resolved.plan, layout)
    model, plan, global_batch, steps = resolved.model, resolved.plan, resolved.global_batch, resolved.steps
    if config.summary:
        print_once(resolved.summary())
        return

    holds = footprint(model, config.optimizer, Techniques(offload=config.offload))
    with start_run("context_parallel", config, layout, resolved.about_data, holds) as run:
        run.log.info("model, whole:\n%s", resolved.summary())
        run.describe(**resolved.describe())

        mesh = build_mesh(layout, run.device.type, config.timeout)
        apply(model, mesh, plan, run.precision, cp_style=cp_style, compile=config.compile, **config.memory())
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
        mine = layout.dp_coordinate(run.rank.rank) * resolved.batch  # its first sample of each global batch
        run.log.info("%d steps of %d × %d tokens", steps, global_batch, config.seq_length)
        for step in range(steps):
            run.clock.start()
            samples = resolved.tokens.batch(step, global_batch, mine, resolved.batch).to(run.device)
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
