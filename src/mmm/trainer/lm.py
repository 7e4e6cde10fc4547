"""Train a Transformer as a language model, on any layout: pp × dp × cp × tp, and ep for its experts.

    launch python3 -m mmm.trainer.lm --max_iters 10
    launch python3 -m mmm.trainer.lm --max_iters 10 --pp 2 --tp 2
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
from mmm.layout import batch_sizes
from mmm.models.definition import check_sizes, of_config
from mmm.nn.init import parameter_count
from mmm.optim.grad_scaler import GradScaler
from mmm.parallel.cp.styles import check_context_parallel, resolve_ulysses
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.run.checkpoints import Checkpoints
from mmm.run.command_line import parse, run_main
from mmm.run.folder import Folder
from mmm.run.hooks.utilization import Utilization
from mmm.run.options import DEFAULT_BATCH_SIZE, CheckpointFlags, Duration, RunFlags
from mmm.run.run import start_run
from mmm.run.save_model import save_model
from mmm.run.sharded import shard
from mmm.run.standard import trainer_hooks
from mmm.run.tables import print_on_rank0
from mmm.runtime.ranks import DRY_RUN, whoami
from mmm.trainer.config import DTYPES, UNLISTED, Adapter, Evaluation, MeshFlags, Model, Optimizer, Text
from mmm.trainer.job import Job
from mmm.trainer.language import balance_experts, check_prompt, log_sample, metadata_of, start_from
from mmm.trainer.load_text import load_text, open_text
from mmm.trainer.lora import adapt, check_adapter, check_stages, lora_of
from mmm.trainer.loss_chunks import check_chunks, chunks_for, logits_bytes
from mmm.trainer.presets import preset_defaults
from mmm.trainer.rate import LearningRate, optimizer_text, schedule_of
from mmm.trainer.sizes import model_sizes
from mmm.trainer.text import TextBatches, evaluate
from mmm.weights.open_weights import open_weights


@dataclass(frozen=True, kw_only=True)
class Config:
    """A language model. The ranks that --pp, --cp and --tp leave are data parallel."""

    model: Model = Model()
    adapter: Adapter = Adapter()
    data: Text = Text()
    mesh: MeshFlags = MeshFlags()
    optimizer: Optimizer = Optimizer(max_norm=1.0, warmup=10)
    evaluation: Evaluation = Evaluation()
    checkpoint: CheckpointFlags = CheckpointFlags()
    duration: Duration = Duration()
    run: RunFlags = RunFlags(plots=True)

    # --gamma is a factor for each epoch, and a language model counts steps.
    LEFT_OUT: ClassVar = ("gamma",)
    # Flags that --help does not list, because few need them.
    UNLISTED: ClassVar = UNLISTED
    CHOICES: ClassVar = {"dtype": DTYPES}

    def check(self) -> None:
        """Check the rules that span groups. Raises ConfigError for the first that is broken."""
        if self.optimizer.optimizer == "muon" and self.mesh.offload:
            raise ConfigError("--optimizer muon with --offload: it needs full matrices on the device; leave one out")
        if self.optimizer.optimizer == "muon" and self.mesh.exact is not None:
            # Its sums depend on how a matrix is multiplied.
            raise ConfigError(f"--exact {self.mesh.exact} with --optimizer muon: only adamw and sgd are exact")
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
    rank = whoami()
    run = config.run
    seq_length = config.data.seq_length
    layout = config.mesh.fit(rank.world_size)
    weights = None
    if config.model.init_from is not None:
        weights = open_weights(config.model.init_from.expanduser())
    # The tokenizer comes from the flags or the text, else from the weights. None: the tokens are random.
    sources = open_text(config.data, lambda: None if weights is None else tokenizer_on_disk(weights.metadata))
    sizes = model_sizes(config.model, weights, seq_length, None if sources is None else sources.vocab_size)
    definition = of_config(sizes)
    lora = lora_of(config.adapter, sizes)
    # A dry run has no hosts.
    ranks_per_host = None if rank.source == DRY_RUN else rank.local_world_size
    techniques = config.mesh.techniques()
    if layout.cp > 1:
        techniques = resolve_ulysses(techniques, layout, sizes.n_heads, ranks_per_host)
    check_context_parallel(techniques, layout)
    check_sizes(sizes, layout, seq_length, techniques.ulysses_size(layout.cp))
    # cp shards the sequence, and so does tp outside of its matrices (sequence parallel). The loss cannot have more
    # chunks than these tokens.
    check_chunks(techniques.loss_chunks, seq_length // (layout.cp * layout.tp))
    batch, global_batch = batch_sizes(run.batch_size, run.global_batch_size, layout.dp, DEFAULT_BATCH_SIZE)
    # Everything that does not need the text is refused before: to read a long one takes time.
    text = load_text(config.data, sources, sizes.vocab_size, run.seed)
    steps_per_epoch = text.train.steps_per_epoch(global_batch)
    notes = text.validation_notes(config.evaluation.eval_batches, global_batch)
    if techniques.ulysses != config.mesh.ulysses:
        notes.append(f"--ulysses {techniques.ulysses}: the most ranks of cp that share a host and divide the heads")
    model, sample = definition.on_meta(sizes, batch, seq_length)
    plan = definition.plan(sizes)
    if lora is not None:
        plan, note = adapt(model, definition, plan, lora)
        notes.append(note)
        if weights is None:
            notes.append("the frozen model is a drawn one: --init_from gives it weights")
    partition = partition_model(model, plan, layout, techniques, sample, run.dtype)
    if lora is not None:
        check_stages(model, lora, partition.names())
    if config.mesh.loss_chunks is None:
        element_size = 8 if run.dtype == "fp64" else 4
        logits = logits_bytes(model, plan, layout, sample, partition.microbatches, element_size)
        chunks = chunks_for(logits, seq_length // layout.cp)
        techniques = replace(techniques, loss_chunks=chunks)
        if chunks > 1:
            notes.append(f"--loss_chunks {chunks}: the full logits would have {logits / 1e9:.1f} GB on a rank")
    lr, scaled = config.optimizer.scaled(global_batch, DEFAULT_BATCH_SIZE)
    notes += scaled
    positions = sizes.position_parameters
    if positions:
        count = parameter_count(model)
        notes.append(f"{count:,} parameters, {count - positions:,} without those of positions")
    job = Job(
        layout=layout,
        techniques=techniques,
        sizes=sizes,
        model=model,
        sample=sample,
        plan=plan,
        partition=partition,
        data=text,
        steps=config.duration.steps(steps_per_epoch),
        optimizer=config.optimizer.optimizer,
        lr=lr,
        balance_rate=config.model.balance(sizes.n_experts > 0 and sizes.softmax_router),
        weights=weights,
        lora=lora,
        metadata=metadata_of(weights, lora, text),
        notes=notes,
    )
    check_prompt(config.evaluation.prompt, job)
    return job


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
    folder = Folder(Checkpoints(config.checkpoint, job.metadata))
    hooks = trainer_hooks(evaluation, Utilization())
    with start_run("lm", config, job, folder, hooks, runs_on_mps=True) as run:
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
                step.row |= evaluate(run, model, job, evaluation.eval_batches, evaluation.eval_train)
                log_sample(run, model, job, evaluation.prompt)
        if config.model.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
