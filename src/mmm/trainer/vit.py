"""Train a Vision Transformer, or a Swin: FSDP, HSDP, DDP or ZeRO over dp, tensor parallel over tp, a pipeline over pp.

    launch python3 -m mmm.trainer.vit --max_iters 10
    launch -n 4 python3 -m mmm.trainer.vit --max_iters 10 --pp 2 --tp 2
    launch python3 -m mmm.trainer.vit --model swin --max_iters 10

Without --preset: large where there is an accelerator, debug where there is none, and the log says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import ConfigError
from mmm.layout import batch_sizes
from mmm.models.definition import check_sizes, find, of_config
from mmm.models.swin.model import PRESETS as SWIN_PRESETS
from mmm.models.vit.model import PRESETS as VIT_PRESETS
from mmm.optim.grad_scaler import GradScaler
from mmm.parallel.partition import partition_model
from mmm.run.checkpoints import Checkpoints
from mmm.run.command_line import parse, run_main
from mmm.run.folder import Folder
from mmm.run.options import DEFAULT_BATCH_SIZE, CheckpointFlags, Duration, RunFlags
from mmm.run.run import start_run
from mmm.run.save_model import save_model
from mmm.run.sharded import shard
from mmm.run.standard import trainer_hooks
from mmm.run.tables import print_on_rank0
from mmm.runtime.device import choose_device
from mmm.runtime.ranks import whoami
from mmm.trainer.config import DTYPES, OPTIMIZERS, UNLISTED, Evaluation, ImageModel, Images, MeshFlags, Optimizer
from mmm.trainer.images import ImageBatches, evaluate
from mmm.trainer.job import Job
from mmm.trainer.load_images import check_images, load_images
from mmm.trainer.rate import LearningRate, optimizer_text, schedule_of

# Samples per step on each data-parallel coordinate, where there is an accelerator and no flag says so.
ACCELERATOR_BATCH_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Config:
    """A Vision Transformer or a Swin on images. The ranks that --pp, --cp and --tp leave are data parallel."""

    model: ImageModel = ImageModel()
    data: Images = Images(dataset="fake")
    mesh: MeshFlags = MeshFlags()
    optimizer: Optimizer = Optimizer(lr=1e-3, max_norm=1.0, warmup=10)
    evaluation: Evaluation = Evaluation(eval_every=0)
    checkpoint: CheckpointFlags = CheckpointFlags()
    duration: Duration = Duration()
    run: RunFlags = RunFlags(plots=True)

    # The models have no sequence that could be computed in chunks, no experts, and no text.
    LEFT_OUT: ClassVar = (
        *("dropout", "gamma", "ulysses", "ep", "loss_chunks", "offload"),
        *("eval_batches", "eval_train", "prompt"),
    )
    UNLISTED: ClassVar = UNLISTED
    CHOICES: ClassVar = {
        # A preset that the other model has is refused.
        "preset": ("auto", *(VIT_PRESETS | SWIN_PRESETS)),
        "dtype": DTYPES,
        "optimizer": OPTIMIZERS,
        "cp_style": ("space",),
    }


def model_sizes(flags: ImageModel, on_cpu: bool) -> tuple[Any, tuple[str, ...]]:
    """The sizes that the flags ask for, before the data decide on the number of classes.

    Returns:
        The sizes; and notes that say why they are these, if no flag does.
    """
    preset = flags.preset
    notes: tuple[str, ...] = ()
    if preset == "auto" and on_cpu:
        preset = "debug"
        notes = ("preset debug: no accelerator here; --preset large asks for large",)
    elif preset == "auto":
        preset = "large"
        notes = ("preset large: there is an accelerator",)
    return find(flags.model).sizes(preset, attention=flags.attention, **flags.sizes()), notes


def resolve(config: Config) -> Job:
    """Find the images, and decide on layout, model, batch and steps. Needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    rank = whoami()
    run = config.run
    layout = config.mesh.fit(rank.world_size)
    on_cpu = choose_device(run.device, rank).type == "cpu"
    sizes, notes = model_sizes(config.model, on_cpu)
    # Before the images are found, which may take a download.
    check_sizes(sizes, layout)
    default_batch_size = DEFAULT_BATCH_SIZE if on_cpu else ACCELERATOR_BATCH_SIZE
    local_batch_size, global_batch_size = batch_sizes(
        run.batch_size, run.global_batch_size, layout.dp, default_batch_size
    )
    data = load_images(config.data, sizes.image_size, sizes.channels, sizes.classes, run.seed)
    classes = len(data.classes)
    if config.model.classes not in (None, classes):
        raise ConfigError(f"--classes {config.model.classes}, but {data.name} has {classes} classes")
    sizes = replace(sizes, classes=classes)
    steps_per_epoch = check_images(data, global_batch_size, layout.dp)
    definition = of_config(sizes)
    model, sample = definition.on_meta(sizes, local_batch_size)
    techniques = config.mesh.techniques()
    if layout.cp > 1:
        # cp has nothing else to split here than the rows of images.
        techniques = replace(techniques, cp_style="space")
    plan = definition.plan(sizes)
    lr, scaled = config.optimizer.scaled(global_batch_size, default_batch_size)
    return Job(
        layout=layout,
        techniques=techniques,
        sizes=sizes,
        model=model,
        sample=sample,
        plan=plan,
        partition=partition_model(model, plan, layout, techniques, sample, run.dtype),
        data=data,
        steps=config.duration.steps(steps_per_epoch),
        optimizer=config.optimizer.optimizer,
        lr=lr,
        notes=[*notes, *scaled],
    )


def train(config: Config) -> None:
    # Everything here is checked before any rank talks to another.
    job = resolve(config)
    if config.model.summary:
        print_on_rank0(job.summary())
        return

    max_norm = config.optimizer.max_norm
    skips = config.optimizer.on_nan == "skip"
    folder = Folder(Checkpoints(config.checkpoint))
    hooks = trainer_hooks(config.evaluation)
    with start_run("vit", config, job, folder, hooks, runs_on_mps=True) as run:
        batches = ImageBatches(run, job, config.data.workers)
        # This rank's part of the model, with its weights.
        model = shard(run, job)
        optimizer = config.optimizer.make(model.parameters(), job.lr, exact=job.techniques.exact is not None)
        rate = LearningRate(optimizer, schedule_of(run, job.steps, config.optimizer))
        # Scales the loss of fp16; with any other data type it does nothing.
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        images = job.data.train.samples
        run.log.info("%s, %d images: %d steps of %d", job.data.name, images, job.steps, job.global_batch_size)
        run.log.info("optimizer: %s", optimizer_text(optimizer))
        # What checkpoints save. A resumed run loads it here.
        run.state(model=model, optimizer=optimizer, scaler=scaler)
        for step in run.steps(
            batches, job.steps, samples=job.global_batch_size, eval_every=config.evaluation.eval_every
        ):
            rate.set(step.index)
            # Under tp the logits stay sharded over the classes.
            with loss_parallel():
                if model.pipeline is None:
                    # Gradients are summed over dp in the backward of the last micro-batch.
                    for batch in model.microbatches(step.batch):
                        loss = model.loss(model(batch), batch, step.count)
                        step.log(loss)
                        scaler.scale(loss).backward()
                else:
                    # The pipeline's schedule makes forwards and backwards, in its order.
                    step.log(model.run_schedule(step.batch, step.count))
            scaler.unscale_(optimizer)
            # NaN or inf: the run ends at the next row; with --on_nan skip this step changes nothing.
            norms = step.check(model, scaler, skips)
            if max_norm:
                step.row["grad_norm"] = model.clip(max_norm, norms)
            if step.updates:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step.evaluates:
                evaluated = evaluate(run, model, batches)
                step.row |= evaluated
                if step.last:
                    accuracy = evaluated["test_acc"]
                    run.log.info("test accuracy %.2f %% of %d images", accuracy, job.data.test.samples)
        if config.model.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
