"""Train a Transformer as a language model, on any layout: pp × dp × cp × tp, and ep for its experts.

launch python3 -m mmm.trainer.lm --max_iters 10
launch python3 -m mmm.trainer.lm --max_iters 10 --pp 2 --tp 2
launch python3 -m mmm.trainer.lm --max_iters 10 --n_experts 8 --ep 2
"""

from __future__ import annotations

from dataclasses import dataclass

from mmm.parallel.assemble import divide
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.layout import LayoutOptions
from mmm.trainer.loop import Fit, fit
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import ExpertOptions, MemoryOptions, TrainingOptions, parse
from mmm.trainer.place import place
from mmm.trainer.report import print_once
from mmm.trainer.run import start_run
from mmm.trainer.save import save_model
from mmm.trainer.schedule import fitting_warmup, warmup_cosine
from mmm.trainer.tasks import TokenTask
from mmm.trainer.text import TextProgramOptions, ValidationOptions, settle


@dataclass(frozen=True, kw_only=True)
class Config(LayoutOptions, ExpertOptions, TextProgramOptions, ValidationOptions, MemoryOptions, TrainingOptions):
    """A language model. The ranks that --pp, --cp and --tpsize leave are data parallel."""

    max_norm: float = 1.0
    """Cut the gradient's norm down to this; 0 leaves it."""
    warmup: int = 10
    """Steps over which the learning rate rises; then it falls as half a cosine."""


def train(config: Config) -> None:
    # Does it fit? Everything here is checked before any rank talks to another.
    how = config.techniques(config.compile, **config.memory())
    setting = settle(config, config.layout(whoami().world_size), default_batch=16, cp_style=how.cp_style)
    config.check_memory(config.seq_length // (setting.layout.cp * setting.layout.tp), config.dtype)
    division = divide(setting.model, setting.plan, setting.layout, how, setting.sample, config.dtype)
    if config.summary:
        print_once(setting.summary())
        return

    holds = footprint(setting.model, config.optimizer, how, division, setting.layout.pp)
    with start_run("lm", config, setting.layout, setting.about_data, holds) as run:
        run.log.info("model, whole:\n%s", setting.summary())
        run.describe(**setting.describe())
        model = place(run, setting.model, setting.plan, how, division)
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        task = TokenTask(
            run, setting.tokens, setting.validation, setting.batch, setting.global_batch, config.eval_batches
        )
        run.log.info("%d steps of %d × %d tokens", setting.steps, setting.global_batch, config.seq_length)
        warmup, cut = fitting_warmup(config.warmup, setting.steps)
        if cut:
            run.note(cut)
        schedule = warmup_cosine(setting.steps, warmup)
        how_long = Fit(
            steps=setting.steps,
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
