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

from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.errors import ConfigError
from mmm.generate import tokenizer_on_disk, without_draws
from mmm.models.definition import of_config
from mmm.nn.draw import parameter_count
from mmm.optim.grad_scaler import GradScaler
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.hooks.utilization import Utilization
from mmm.run.run import start_run
from mmm.run.save_model import save_model
from mmm.run.sharded import shard
from mmm.run.standard import trainer_hooks
from mmm.run.step import Step
from mmm.run.tables import print_on_rank0
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
from mmm.trainer.language import check_prompt, log_sample, start_from
from mmm.trainer.rate import LearningRate, optimizer_text, schedule_of
from mmm.trainer.text import TextBatches, validate


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


def metadata_of(job: Job) -> ModelMetadata:
    """What a checkpoint keeps for those who sample from it."""
    tokenizer = job.data.tokenizer
    if tokenizer is None:
        return ModelMetadata(job.data.train.seq_length, job.eos, bos=job.bos)
    file = (tokenizer.file, tokenizer.content)
    return ModelMetadata(job.data.train.seq_length, job.eos, file, bos=job.bos, chat=tokenizer.chat)


def balance_experts(model: ParallelModel, step: Step, scaler: GradScaler, rate: float) -> None:
    """Move the biases of experts with more, or less, than the mean load; not after a step that was skipped."""
    skipped = scaler.found_inf if step.skip is None else step.skip
    imbalance = model.balance_experts(rate if skipped is None else rate * (1 - skipped), step.due)
    if imbalance is not None:
        step.row["imbalance"] = imbalance


def train(config: Config) -> None:
    job = resolve(config)  # everything here is checked before any rank talks to another
    if config.run.summary:
        print_on_rank0(job.summary())
        return

    hooks = trainer_hooks(config.checkpoint, config.profile, metadata_of(job), Utilization())
    with start_run("lm", config, job, hooks, runs_on_mps=True) as run:
        if job.weights is not None:
            without_draws(job.model)
        model = shard(run, job)  # this rank's part of the model, with its weights
        start_from(run, model, job.weights)
        optimizer = build_optimizer(config.optimizer, model, job)
        rate = LearningRate(optimizer, schedule_of(run, job.steps, config.optimizer))
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        run.log.info("%d steps of %d × %d tokens", job.steps, job.global_batch_size, config.data.seq_length)
        run.log.info("optimizer: %s", optimizer_text(optimizer))
        run.state(model=model, optimizer=optimizer, scaler=scaler)  # where the run goes on, they are loaded here
        for step in run.steps(
            TextBatches(run, job, job.data.train, model),
            job.steps,
            samples=job.global_batch_size,
            tokens=job.global_batch_size * config.data.seq_length,
            eval_every=config.evaluation.eval_every,
        ):
            rate.set(step.number)
            with loss_parallel():  # under tp the logits stay sharded over the vocabulary
                if model.pipeline is None:
                    for batch in step.microbatches:  # gradients are summed over dp after the last one
                        loss = model.loss(model(batch), batch, step.count)
                        step.log(loss)
                        scaler.scale(loss).backward()
                else:
                    step.log(model.run_schedule(step.batch, step.count))  # forwards and backwards, in its order
            scaler.unscale_(optimizer)
            # What is not finite ends the run at the next row, or is skipped now.
            norms = step.check(model, scaler, skips=config.optimizer.on_nan == "skip")
            if config.optimizer.max_norm:
                step.row["grad_norm"] = model.clip(config.optimizer.max_norm, norms)
            if step.skip is None or not step.skip.item():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            balance_experts(model, step, scaler, config.experts.balance())
            if step.evaluates:
                step.row |= validate(run, model, job, config.evaluation.eval_batches, config.evaluation.eval_train)
                log_sample(run, model, job, config.sample, job.bos, job.eos)
        if config.checkpoint.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
