"""Train a Transformer as a language model, on any layout: pp × dp × cp × tp, and ep for its experts.

    launch python3 -m mmm.trainer.lm --max_iters 10
    launch python3 -m mmm.trainer.lm --max_iters 10 --pp 2 --tpsize 2
    launch python3 -m mmm.trainer.lm --max_iters 10 --n_experts 8 --ep 2

The losses are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import ConfigError
from mmm.generate import tokenizer_on_disk, without_draws
from mmm.models.definition import of_config
from mmm.nn.draw import parameter_count
from mmm.optim.grad_scaler import GradScaler
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.command_line import parse, run_main
from mmm.run.hooks.utilization import Utilization
from mmm.run.options import DEFAULT_BATCH_SIZE, Checkpoint, Duration, Run
from mmm.run.run import start_run
from mmm.run.save_model import save_model
from mmm.run.sharded import shard
from mmm.run.standard import trainer_hooks
from mmm.run.tables import print_on_rank0
from mmm.runtime.ranks import whoami
from mmm.trainer.config import DTYPES, UNLISTED, Adapter, Evaluation, Mesh, Model, Optimizer, Text
from mmm.trainer.job import Job, with_optimizer
from mmm.trainer.language import balance_experts, check_prompt, log_sample, metadata_of, start_from
from mmm.trainer.load_text import load_text, open_text
from mmm.trainer.lora import check_adapter, check_stages, lora_of, with_lora
from mmm.trainer.planned import chunk_loss, with_plan
from mmm.trainer.presets import preset_defaults
from mmm.trainer.rate import LearningRate, optimizer_text, schedule_of
from mmm.trainer.sizes import model_sizes
from mmm.trainer.text import TextBatches, validate
from mmm.trainer.text_job import text_job
from mmm.weights.open_weights import open_weights


@dataclass(frozen=True, kw_only=True)
class Config:
    """A language model. The ranks that --pp, --cp and --tpsize leave are data parallel."""

    model: Model = Model()
    adapter: Adapter = Adapter()
    data: Text = Text()
    mesh: Mesh = Mesh()
    optimizer: Optimizer = Optimizer(max_norm=1.0, warmup=10)
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    duration: Duration = Duration()
    run: Run = Run(plots=True)

    # --gamma is a factor for each epoch, and a language model counts steps.
    LEFT_OUT: ClassVar = ("gamma",)
    # Flags that --help does not list, because few need them.
    UNLISTED: ClassVar = UNLISTED
    CHOICES: ClassVar = {"dtype": DTYPES}

    def check(self) -> None:
        """Check the rules that span groups. Raises ConfigError for the first that is broken."""
        if self.optimizer.optimizer == "muon" and self.mesh.offload:
            raise ConfigError("--optimizer muon with --offload: it needs full matrices on the device; leave one out")
        check_adapter(self.adapter, self.mesh, self.optimizer)

    @classmethod
    def defaults(cls, flags: Mapping[str, str]) -> dict[str, Any]:
        """The defaults that a preset sets: some set batch, steps and learning rate, besides the sizes of the model."""
        return preset_defaults(flags)


def resolve(config: Config) -> Job:
    """Find text and weights, and decide on layout, model, batch and steps. Needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    data = config.data
    run = config.run
    layout = config.mesh.fit(whoami().world_size)
    weights = None
    if config.model.init_from is not None:
        weights = open_weights(config.model.init_from.expanduser())
    # The tokenizer comes from the flags or the text, else from the weights. None: the tokens are random.
    sources = open_text(data, lambda: None if weights is None else tokenizer_on_disk(weights.metadata))
    vocab_size = None if sources is None else sources.vocab_size
    sizes = model_sizes(config.model, weights, data.seq_length, vocab_size)
    lora = lora_of(config.adapter, sizes)
    job = text_job(
        run,
        config.duration,
        sizes,
        layout,
        config.mesh.techniques(),
        data.seq_length,
        # Called once the sizes are known to fit, because reading a long text takes time.
        lambda: load_text(data, sources, sizes.vocab_size, run.seed),
        eval_batches=config.evaluation.eval_batches,
    )
    job = with_optimizer(job, config.optimizer, DEFAULT_BATCH_SIZE)
    # cp shards the sequence, and so does tp outside of its matrices (sequence parallel). The loss cannot have more
    # chunks than these tokens.
    local_tokens = data.seq_length // (layout.cp * layout.tp)
    plan = of_config(sizes).plan(sizes)
    if lora is not None:
        job, plan = with_lora(replace(job, weights=weights), plan, lora)
    job = with_plan(job, plan, run.dtype, local_tokens)
    check_stages(job)
    # Without --loss_chunks, as many chunks as keep the logits small.
    if config.mesh.loss_chunks is None:
        job = chunk_loss(job, run.dtype)
    notes = job.notes
    positions = sizes.position_parameters
    if positions:
        count = parameter_count(job.model)
        notes = (*notes, f"{count:,} parameters, {count - positions:,} without those of positions")
    metadata = metadata_of(weights, lora, job.data)
    job = replace(job, weights=weights, metadata=metadata, notes=notes)
    check_prompt(config.evaluation.prompt, job)
    balance_rate = 0.01 if config.model.balance_rate is None else config.model.balance_rate
    return replace(job, balance_rate=balance_rate)


def build_optimizer(flags: Optimizer, model: ParallelModel, job: Job) -> torch.optim.Optimizer:
    """The optimizer that the flags ask for."""
    if flags.optimizer == "muon":
        from mmm.optim.muon import make_muon

        return make_muon(model, job.plan, job.lr, flags.weight_decay, flags.decayed or "all", flags.betas)
    # Without --lora these are all of them.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return flags.make(trained, job.lr, exact=job.techniques.exact is not None)


def train(config: Config) -> None:
    # Everything here is checked before any rank talks to another.
    job = resolve(config)
    if config.model.summary:
        print_on_rank0(job.summary())
        return

    evaluation = config.evaluation
    max_norm = config.optimizer.max_norm
    skips = config.optimizer.on_nan == "skip"
    hooks = trainer_hooks(config.checkpoint, evaluation, job.metadata, Utilization())
    with start_run("lm", config, job, hooks, runs_on_mps=True) as run:
        # Weights from files replace the initial ones, so none are drawn.
        if job.weights is not None:
            without_draws(job.model)
        # This rank's part of the model, with its weights.
        model = shard(run, job)
        start_from(run, model, job.weights)
        optimizer = build_optimizer(config.optimizer, model, job)
        rate = LearningRate(optimizer, schedule_of(run, job.steps, config.optimizer))
        # Scales the loss of fp16; with any other data type it does nothing.
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        run.log.info("%d steps of %d × %d tokens", job.steps, job.global_batch_size, config.data.seq_length)
        run.log.info("optimizer: %s", optimizer_text(optimizer))
        # What checkpoints save. A resumed run loads it here.
        run.state(model=model, optimizer=optimizer, scaler=scaler)
        for step in run.steps(
            TextBatches(run, job, job.data.train, model),
            job.steps,
            samples=job.global_batch_size,
            tokens=job.global_batch_size * config.data.seq_length,
            eval_every=evaluation.eval_every,
        ):
            rate.set(step.index)
            # Under tp the logits stay sharded over the vocabulary.
            with loss_parallel():
                if model.pipeline is None:
                    # Gradients are summed over dp in the backward of the last micro-batch. `step.count` is the number
                    # of targets in the global batch.
                    for batch in model.microbatches(step.batch):
                        loss = model.loss(model(batch), batch, step.count)
                        step.log(loss)
                        scaler.scale(loss).backward()
                else:
                    # The pipeline's schedule makes forwards and backwards, in its order. It has no scaler: fp16 with pp
                    # is refused.
                    step.log(model.run_schedule(step.batch, step.count))
            scaler.unscale_(optimizer)
            # After a NaN or inf the run ends when the next row is logged; with --on_nan skip this step changes nothing.
            norms = step.check(model, scaler, skips)
            if max_norm:
                step.row["grad_norm"] = model.clip(max_norm, norms)
            if step.updates:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            balance_experts(model, step, scaler, job.balance_rate)
            if step.evaluates:
                step.row |= validate(run, model, job, evaluation.eval_batches, evaluation.eval_train)
                log_sample(run, model, job, evaluation.prompt)
        if config.model.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
