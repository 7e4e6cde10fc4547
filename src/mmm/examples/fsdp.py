"""Data parallelism on a small convolutional net: DDP or FSDP (ZeRO-3), by one flag.

    launch python3 -m mmm.examples.fsdp --epochs 2
    launch -n 4 python3 -m mmm.examples.fsdp --epochs 2 --parallel ddp

Every rank has its own samples of each step. What differs is what each of the N ranks keeps in memory::

                parameters    gradients    optimizer state    communication of a step
      ddp         whole         whole          whole          all-reduce
      fsdp        1/N           1/N            1/N            all-gather twice, reduce-scatter

The losses are the same for both. By default the net trains for 10 epochs (8 on the digits) and logs one row per epoch.
Every test image counts once, whatever the number of ranks. At the end a line says how much memory this rank needs, and
how much it would need with DDP. For ZeRO-1, ZeRO-2 and HSDP, accumulation and clipping, see ``mmm.trainer.cnn``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from mmm.examples import _support as example
from mmm.layout import Techniques
from mmm.models.cnn.model import CNN
from mmm.nn.init import parameter_count
from mmm.optim.adamw import STATE
from mmm.parallel import cross_entropy, draw_weights
from mmm.parallel.memory.measure import local_elements
from mmm.run import options
from mmm.run.save_model import save_model
from mmm.trainer.config import ImageModel, Images, Optimizer
from mmm.trainer.images import ImageBatches
from mmm.trainer.load_images import cnn_job
from mmm.trainer.rate import LearningRate, step_decay


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions):
    """Train the MNIST net on images. --parallel says how its parameters are spread over the ranks."""

    BREAKS: ClassVar = {
        "averaged": "Each rank takes the mean over its own labels, and the gradients are averaged, as DDP and FSDP do "
        "unless told otherwise. Half of the first rank's images have no label here, so each of its labelled images "
        "weighs twice as much as an image of another rank. With even counts it would be right.",
    }
    parallel: Literal["ddp", "fsdp"] = "fsdp"
    """ddp: every rank has a whole replica. fsdp: parameters, gradients and optimizer state are sharded."""
    model: ImageModel = ImageModel()
    data: Images = Images()
    optimizer: Optimizer = Optimizer(lr=1e-3)
    duration: options.Duration = options.Duration()
    run: options.RunFlags = options.RunFlags(plots=True)

    LEFT_OUT: ClassVar = (
        *("model", "preset", "image_size", "patch_size", "channels", "classes"),
        *("dim", "n_layers", "n_heads", "window", "attention"),
        "max_norm",
        "on_nan",
        "warmup",
        "lr_schedule",
        "min_lr",
        "decay",
        "betas",
        "weight_decay",
        "decayed",
        "log_every",
        "tracker",
    )
    CHOICES: ClassVar = {"optimizer": ("adamw", "sgd")}


def parallelize(run: example.Run, model: CNN, config: Config) -> nn.Module:
    """Wrap the model in DDP or FSDP, and draw its initial weights, which are the same on every mesh."""
    mesh = init_device_mesh(run.device.type, (run.layout.dp,), mesh_dim_names=("dp_shard",))
    run.log.info("%s, %s", config.parallel, mesh)

    if config.parallel == "ddp":
        draw_weights(model, run.device, config.run.seed)
        return DDP(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)

    # An FSDP unit is all-gathered before it computes and freed afterwards. fc1 has 98 % of the parameters, so it is a
    # unit of its own; the root module takes the rest.
    policy = MixedPrecisionPolicy(run.precision.compute, reduce_dtype=run.precision.storage)
    for module in (model.fc1, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)  # type: ignore[arg-type]
    example.sum_gradients(model)
    # The model is still on the meta device. Each rank draws only its own shard: no rank ever holds the full model.
    draw_weights(model, run.device, config.run.seed)
    return model


def train(config: Config) -> None:
    config = example.for_a_mistake(config)
    job = cnn_job(config, example.fit(), Techniques(data_parallel=config.parallel))
    elements = parameter_count(job.model)
    with example.start_run("fsdp", config, job, example.global_images) as run:
        model = parallelize(run, job.model.to(run.precision.storage), config)
        run.log.info("%s", example.sharded_model(model))
        # FSDP's policy already computes in the lower precision; DDP needs autocast for that.
        autocast = run.precision.mixed and config.parallel == "ddp"
        optimizer = config.optimizer.make(model.parameters(), job.lr)
        # Each local loss is a sum divided by the *global* count, so gradients are to be summed over the ranks.
        # FSDP was told to (sum_gradients). DDP averages, so each loss is multiplied by the number of ranks.
        factor = 1
        if config.parallel == "ddp":
            factor = run.layout.dp
        batches = ImageBatches(run, job, config.data.workers)
        # The learning rate falls after each epoch.
        rate = LearningRate(optimizer, step_decay(batches.steps_per_epoch, job.gamma))
        first_sample = run.layout.dp_coordinate(run.rank.rank) * job.local_batch_size
        run.state(model=model, optimizer=optimizer)
        for step in example.image_steps(run, job, batches):
            rate.set(step.index)
            batch = step.batch
            count = batch.count
            if config.break_ == "averaged":
                # The mistake: divide by this rank's labels, then average over the ranks.
                batch = example.without_labels(job, batch, first_sample)
                local_count = int((batch.targets >= 0).sum())
                count = local_count * run.layout.dp
            with torch.autocast(run.device.type, run.precision.compute, enabled=autocast):
                # (local batch, classes). The keys decide what dropout drops of each sample, the same on any mesh.
                logits = model(batch.inputs, batch.sample_keys)
            loss = cross_entropy(logits, batch.targets, count)
            step.log(loss)
            (loss * factor).backward()
            optimizer.step()
            if step.last:
                # Count before zero_grad, while the gradients still exist.
                local = local_elements(model, optimizer)
            optimizer.zero_grad()
            if step.evaluates:
                step.row |= example.evaluate_net(run, model, batches)

        megabytes = run.precision.storage.itemsize / 1e6
        own = sum(local.values()) * megabytes
        # With DDP: one element for the parameter, one for its gradient, and the optimizer's state.
        ddp = elements * (2 + STATE[config.optimizer.optimizer]) * megabytes
        run.log.info(
            "rank 0 keeps %.2f MB of parameters, gradients and optimizer state; with DDP %.2f MB",
            own,
            ddp,
        )
        run.describe(local_elements=local)
        if config.model.save_model:
            save_model(run, model)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
