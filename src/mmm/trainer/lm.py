"""Train a Transformer as a language model, on any layout: pp × dp × cp × tp, and ep for its experts.

    launch python3 -m mmm.trainer.lm --max_iters 10
    launch python3 -m mmm.trainer.lm --max_iters 10 --pp 2 --tp 2
    launch python3 -m mmm.trainer.lm --max_iters 10 --n_experts 8 --ep 2

The losses are the same on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmm.parallel.memory.offload import moved_text
from mmm.trainer.flags import run_main
from mmm.trainer.layout import LayoutOptions, MemoryOptions
from mmm.trainer.loop import Fit, fit
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import TrainingOptions, parse
from mmm.trainer.parallelize import parallelize
from mmm.trainer.report import print_once
from mmm.trainer.run import start_run
from mmm.trainer.save import save_model
from mmm.trainer.schedule import fitting_warmup_cosine
from mmm.trainer.tasks import TokenTask
from mmm.trainer.text import DocumentOptions, ExpertOptions, TextProgramOptions, ValidationOptions, resolve


@dataclass(frozen=True, kw_only=True)
class Config(
    LayoutOptions,
    ExpertOptions,
    DocumentOptions,
    TextProgramOptions,
    ValidationOptions,
    MemoryOptions,
    TrainingOptions,
):
    """A language model. The ranks that --pp, --cp and --tpsize leave are data parallel."""

    max_norm: float = 1.0
    """Clip the gradient's norm to this; 0 leaves it."""
    warmup: int = 10
    """Steps over which the learning rate rises; then it falls as half a cosine."""


def train(config: Config) -> None:
    resolved = resolve(config)  # everything here is checked before any rank talks to another
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("lm", config, resolved) as run:
        model = parallelize(run, resolved)
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        task = TokenTask(run, resolved, config.eval_batches)
        run.log.info("%d steps of %d × %d tokens", resolved.steps, resolved.global_batch_size, config.seq_length)
        options = Fit(
            steps=resolved.steps,
            max_norm=config.max_norm,
            schedule=fitting_warmup_cosine(run, resolved.steps, config.warmup),
            eval_every=config.eval_every,
            balance_rate=config.balance(),
            skip=config.on_nan == "skip",
        )
        fit(run, model, optimizer, task, options)
        if config.offload:
            run.log.info("%s", moved_text(model.modules.values(), optimizer, run.device))
        if config.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
