"""Train a Transformer as a language model, on any layout: pp × dp × cp × tp, and ep for its experts.

launch python3 -m mmm.trainer.lm --max_iters 10
launch python3 -m mmm.trainer.lm --max_iters 10 --pp 2 --tp 2
launch python3 -m mmm.trainer.lm --max_iters 10 --n_experts 8 --ep 2
"""

from __future__ import annotations

from dataclasses import dataclass

from mmm.parallel.partition import partition_model
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.flags import run_main
from mmm.trainer.layout import LayoutOptions
from mmm.trainer.loop import Fit, fit
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import ExpertOptions, MemoryOptions, TrainingOptions, parse
from mmm.trainer.parallelize import parallelize
from mmm.trainer.report import print_once
from mmm.trainer.run import start_run
from mmm.trainer.save import save_model
from mmm.trainer.schedule import fitting_warmup, warmup_cosine
from mmm.trainer.tasks import TokenTask
from mmm.trainer.text import TextProgramOptions, ValidationOptions, resolve


@dataclass(frozen=True, kw_only=True)
class Config(LayoutOptions, ExpertOptions, TextProgramOptions, ValidationOptions, MemoryOptions, TrainingOptions):
    """A language model. The ranks that --pp, --cp and --tpsize leave are data parallel."""

    max_norm: float = 1.0
    """Cut the gradient's norm down to this; 0 leaves it."""
    warmup: int = 10
    """Steps over which the learning rate rises; then it falls as half a cosine."""


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    techniques = config.techniques(config.compile, **config.memory())
    resolved = resolve(config, config.layout(whoami().world_size), default_batch=16, cp_style=techniques.cp_style)
    config.check_memory(config.seq_length // (resolved.layout.cp * resolved.layout.tp), config.dtype)
    partition = partition_model(
        resolved.model, resolved.plan, resolved.layout, techniques, resolved.sample, config.dtype
    )
    if config.summary:
        print_once(resolved.summary())
        return

    holds = footprint(resolved.model, config.optimizer, techniques, partition, resolved.layout.pp)
    with start_run("lm", config, resolved.layout, resolved.about_data, holds) as run:
        run.log.info("model, whole:\n%s", resolved.summary())
        run.describe(**resolved.describe())
        model = parallelize(run, resolved.model, resolved.plan, techniques, partition)
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        task = TokenTask(
            run, resolved.tokens, resolved.validation, resolved.batch, resolved.global_batch, config.eval_batches
        )
        run.log.info("%d steps of %d × %d tokens", resolved.steps, resolved.global_batch, config.seq_length)
        warmup, cut = fitting_warmup(config.warmup, resolved.steps)
        if cut:
            run.note(cut)
        schedule = warmup_cosine(resolved.steps, warmup)
        how_long = Fit(
            steps=resolved.steps,
            max_norm=config.max_norm,
            schedule=schedule,
            eval_every=config.eval_every,
            balance_rate=config.balance(),
        )
        fit(run, model, optimizer, task, how_long)
        if config.save_model:
            save_model(run, model)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
