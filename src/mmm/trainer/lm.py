"""Train a Transformer as a language model, on any layout: pp × dp × cp × tp, and ep for its experts.

    launch python3 -m mmm.trainer.lm --max_iters 10
    launch python3 -m mmm.trainer.lm --max_iters 10 --pp 2 --tp 2
    launch python3 -m mmm.trainer.lm --max_iters 10 --n_experts 8 --ep 2

The losses are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from mmm.errors import ConfigError
from mmm.generate.weights import without_draws
from mmm.parallel.memory.offload import moved_text
from mmm.trainer.config.flags import run_main
from mmm.trainer.config.layout import LayoutOptions, MemoryOptions
from mmm.trainer.config.loop_options import TrainingOptions
from mmm.trainer.config.options import parse
from mmm.trainer.config.presets import preset_defaults
from mmm.trainer.config.pretrained import PretrainedOptions
from mmm.trainer.config.resolve_plan import resolve
from mmm.trainer.config.resolve_text import ValidationOptions
from mmm.trainer.config.samples import SampleOptions
from mmm.trainer.config.text import DocumentOptions, TextProgramOptions
from mmm.trainer.loop.fit import Fit, fit
from mmm.trainer.loop.pretrained import start_from
from mmm.trainer.loop.samples import log_sample
from mmm.trainer.loop.save import save_model
from mmm.trainer.loop.tasks import TokenTask
from mmm.trainer.optim.optimizer import make_optimizer
from mmm.trainer.optim.schedule import schedule_of
from mmm.trainer.run.core import start_run
from mmm.trainer.run.parallelize import parallelize
from mmm.trainer.run.standard import standard_hooks
from mmm.trainer.run.tables import print_once
from mmm.trainer.run.utilization import Utilization


@dataclass(frozen=True, kw_only=True)
class Config(
    LayoutOptions,
    PretrainedOptions,
    DocumentOptions,
    TextProgramOptions,
    ValidationOptions,
    SampleOptions,
    MemoryOptions,
    TrainingOptions,
):
    """A language model. The ranks that --pp, --cp and --tpsize leave are data parallel."""

    max_norm: float = 1.0
    """Clip the gradient's norm to this; 0 leaves it."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"  # type: ignore[assignment]
    """muon: matrices by the orthogonalized momentum, embedding, output and norms by AdamW."""
    warmup: int = 10
    """Steps over which the learning rate rises; then --lr_schedule."""

    def check(self) -> None:
        super().check()
        if self.optimizer == "muon" and self.offload:
            raise ConfigError("--optimizer muon with --offload: it needs full matrices on the device; leave one out")

    @classmethod
    def defaults(cls, words: Sequence[str]) -> dict[str, Any]:
        return preset_defaults(words)


def train(config: Config) -> None:
    resolved = resolve(config)  # everything here is checked before any rank talks to another
    bos, eos = config.text_ends(resolved.data.tokenizer)
    config.check_prompt(resolved, bos)
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("lm", config, resolved, standard_hooks(Utilization())) as run:
        if (weights := config.weights()) is not None:
            without_draws(resolved.model)
        model = parallelize(run, resolved)
        start_from(run, model, weights)
        rates = (config.lr, config.weight_decay, config.decayed)
        if config.optimizer == "muon":
            from mmm.trainer.optim.muon import make_muon

            optimizer: Optimizer = make_muon(model, resolved.plan, *rates)
        else:
            optimizer = make_optimizer(config.optimizer, model.parameters(), *rates)
        task = TokenTask(
            run, resolved, config.eval_batches, bos, eos, lambda model: log_sample(run, model, resolved, bos, eos)
        )
        run.log.info("%d steps of %d × %d tokens", resolved.steps, resolved.global_batch_size, config.seq_length)
        options = Fit(
            steps=resolved.steps,
            max_norm=config.max_norm,
            schedule=schedule_of(run, resolved.steps, config),
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
