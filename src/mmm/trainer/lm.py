"""Train a Transformer as a language model, on any layout: pp × dp × cp × tp, and ep for its experts.

    launch python3 -m mmm.trainer.lm --max_iters 10
    launch python3 -m mmm.trainer.lm --max_iters 10 --pp 2 --tp 2
    launch python3 -m mmm.trainer.lm --max_iters 10 --n_experts 8 --ep 2

The losses are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer

from mmm.errors import ConfigError
from mmm.generate import tokenizer_on_disk, without_draws
from mmm.models.definition import of_config
from mmm.nn.draw import parameter_count
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.ranks import whoami
from mmm.trainer.config.command_line import parse, run_main
from mmm.trainer.config.data import TextOptions
from mmm.trainer.config.language_model import LanguageModelOptions, SampleOptions, text_ends
from mmm.trainer.config.layout import SequenceLayoutOptions, techniques_of
from mmm.trainer.config.presets import preset_defaults
from mmm.trainer.config.profile import ProfileOptions
from mmm.trainer.config.resolve_plan import chunk_loss, with_plan
from mmm.trainer.config.resolve_text import resolve_text
from mmm.trainer.config.run import DEFAULT_BATCH_SIZE, ValidationOptions
from mmm.trainer.config.scaled_lr import with_scaled_lr
from mmm.trainer.config.training import (
    ExpertOptions,
    MemoryOptions,
    ScheduledOptions,
    TrainerCheckpoint,
    TrainerRun,
    check_resume,
)
from mmm.trainer.job import Job
from mmm.trainer.loop.fit import FitConfig, fit
from mmm.trainer.loop.language import check_prompt, log_sample, start_from
from mmm.trainer.loop.save import save_model
from mmm.trainer.loop.schedule import schedule_of
from mmm.trainer.loop.tasks import TokenTask
from mmm.trainer.run.core import start_run
from mmm.trainer.run.parallel_model import build_parallel_model
from mmm.trainer.run.standard import standard_hooks
from mmm.trainer.run.tables import print_on_rank0
from mmm.trainer.run.utilization import Utilization


@dataclass(frozen=True, kw_only=True)
class LanguageOptimizer(ScheduledOptions):
    """How weights are updated."""

    optimizer: Literal["adamw", "sgd", "muon", "lars", "lamb"] = "adamw"  # type: ignore[assignment]
    """lars, lamb: SGD with momentum, and AdamW, whose step of each tensor is in proportion to the tensor's norm: for
    large batches, and large rates. muon: matrices by the orthogonalized momentum, embedding, output and norms by
    AdamW."""


@dataclass(frozen=True, kw_only=True)
class LanguageValidation(ValidationOptions):
    """How often to evaluate, and on how much text."""

    eval_train: bool = False
    """Evaluate as many batches of the training text as well, without dropout: train_loss."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A language model. The ranks that --pp, --cp and --tpsize leave are data parallel."""

    model: LanguageModelOptions = LanguageModelOptions()
    experts: ExpertOptions = ExpertOptions()
    data: TextOptions = TextOptions()
    layout: SequenceLayoutOptions = SequenceLayoutOptions()
    optimizer: LanguageOptimizer = LanguageOptimizer(max_norm=1.0, warmup=10)
    memory: MemoryOptions = MemoryOptions()
    evaluation: LanguageValidation = LanguageValidation()
    sample: SampleOptions = SampleOptions()
    checkpoint: TrainerCheckpoint = TrainerCheckpoint()
    profile: ProfileOptions = ProfileOptions()
    run: TrainerRun = TrainerRun()

    def check(self) -> None:
        """Rules that span groups. Raises ConfigError for the first that is broken."""
        check_resume(self.checkpoint, self.run)
        if self.optimizer.optimizer == "muon" and self.memory.offload:
            raise ConfigError("--optimizer muon with --offload: it needs full matrices on the device; leave one out")

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> dict[str, Any]:
        """Of the flags of a command line with a preset that sets more than sizes."""
        return preset_defaults(argv)


def resolve(config: Config) -> Job:
    """Find text and weights, and decide on layout, model, batch and steps; needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    layout = config.layout.fit(whoami().world_size)
    techniques = techniques_of(config.layout, config.memory)
    weights = config.model.weights()
    sources = config.data.sources(lambda: None if weights is None else tokenizer_on_disk(weights.metadata))
    vocabulary, seq_length = None if sources is None else sources.vocab_size, config.data.seq_length
    sizes = config.model.model_sizes(config.experts, weights, seq_length, vocabulary)
    own = resolve_text(
        config.run,
        sizes,
        layout,
        techniques,
        config.optimizer.optimizer,
        seq_length,
        partial(config.data.load, sources, sizes.vocab_size, config.run.seed),
        evaluation=config.evaluation,
    )
    own = with_scaled_lr(own, config.optimizer, DEFAULT_BATCH_SIZE)
    spec = with_plan(own, of_config(sizes).plan(sizes), config.run.dtype, seq_length // (layout.cp * layout.tp))
    if config.memory.loss_chunks is None:
        spec = chunk_loss(spec, config.run.dtype)
    if positions := sizes.position_parameters:
        count = parameter_count(spec.model)
        spec = replace(
            spec, notes=(*spec.notes, f"{count:,} parameters, {count - positions:,} without those of positions")
        )
    bos, eos = text_ends(weights, spec.data.tokenizer)
    check_prompt(config.sample, spec, bos)
    return replace(spec, weights=weights, bos=bos, eos=eos)


def build_optimizer(config: LanguageOptimizer, model: ParallelModel, spec: Job) -> Optimizer:
    """The optimizer that the flags ask for."""
    if config.optimizer == "muon":
        from mmm.optim.muon import make_muon

        decayed = config.decayed or "all"
        return make_muon(model, spec.plan, spec.lr or config.lr, config.weight_decay, decayed, config.betas)
    return config.make(model.parameters(), spec.lr)


def train(config: Config) -> None:
    spec = resolve(config)  # everything here is checked before any rank talks to another
    if config.run.summary:
        print_on_rank0(spec.summary())
        return

    hooks = standard_hooks(config.checkpoint, config.profile, Utilization())
    with start_run("lm", config, spec, hooks, runs_on_mps=True) as run:
        if spec.weights is not None:
            without_draws(spec.model)
        model = build_parallel_model(run, spec)
        start_from(run, model, spec.weights)
        optimizer = build_optimizer(config.optimizer, model, spec)
        sample = partial(log_sample, run, resolved=spec, options=config.sample, bos=spec.bos, stop=spec.eos)
        evaluation = config.evaluation
        task = TokenTask(run, spec, evaluation.eval_batches, evaluation.eval_train, spec.bos, spec.eos, sample)
        run.log.info("%d steps of %d × %d tokens", spec.steps, spec.global_batch_size, config.data.seq_length)
        fit_config = FitConfig(
            steps=spec.steps,
            max_norm=config.optimizer.max_norm,
            schedule=schedule_of(run, spec.steps, config.optimizer),
            evaluation=evaluation,
            balance_rate=config.experts.balance(),
            skip=config.optimizer.on_nan == "skip",
            checkpoint=config.checkpoint,
            profile=config.profile,
        )
        fit(run, model, optimizer, task, fit_config)
        if config.checkpoint.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
