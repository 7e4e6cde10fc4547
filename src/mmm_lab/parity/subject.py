"""A model on a layout as `mmm_verify` compares it: the model on one device, its batch and its step, and the ranks'."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmm.data import Batch
from mmm.errors import ConfigError, LayoutError
from mmm.layout import PADDING, Layout
from mmm.nn import init, weights
from mmm.nn.attention import Documents
from mmm.nn.dropout import has_dropout, sample_keys
from mmm.nn.experts import has_experts
from mmm.nn.meta import meta_parameters
from mmm.parallel.mesh import build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import Partition, partition_model
from mmm.parallel.plan import unmatched
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.runtime.device import Precision, choose_device
from mmm.runtime.log import get_logger
from mmm.runtime.process_group import gather_floats
from mmm.runtime.ranks import whoami
from mmm_lab.parity.layouts import ParityCase, layout_of
from mmm_lab.parity.parity_model import ParityModel
from mmm_verify.dtypes import by_default
from mmm_verify.subject import Subject, make_subject

# Samples of a step, if nobody says: 8 data-parallel coordinates of 2 micro-batches, or 4 stages of 8.
GLOBAL_BATCH = 16
SEED = 0
# Names of types in `mmm` and in `mmm_verify`.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class PreparedCase:
    """A case that has been checked, before any rank is started.

    Attributes:
        parity: its model.
        case: the case, with the number of micro-batches.
        layout: the sizes of its axes.
        partition: which parts of the model are in which pipeline stage.
        samples: samples of the global batch.
    """

    parity: ParityModel
    case: ParityCase
    layout: Layout
    partition: Partition
    samples: int


def prepare(parity: ParityModel, case: ParityCase, samples: int = GLOBAL_BATCH) -> PreparedCase:
    """Check that a model can be put on a layout. Needs no process group.

    Raises:
        UserError: it cannot; with the reason.
    """
    layout = layout_of(case.sizes).fit(case.ranks)
    if samples % layout.dp:
        raise LayoutError(
            f"layout {case.layout}: the global batch of {samples} samples does not divide over "
            f"{layout.dp} data-parallel coordinates: change --global_batch_size, or dp"
        )
    own_samples = samples // layout.dp
    microbatches = None
    if layout.pp == 1:
        microbatches = min(parity.least_microbatches, own_samples)
    elif case.schedule in SCHEDULES:
        # The fewest that keep the stages busy.
        fewest, *_ = SCHEDULES[case.schedule].microbatches(layout.pp)
        microbatches = max(parity.least_microbatches, fewest)
    case = replace(case, microbatches=microbatches)
    inputs = make_batch(parity, case.data, samples)["inputs"]
    # The first data-parallel rank's samples, without values.
    meta = inputs[:own_samples].to("meta")
    # The model is in float32 here.
    if meta.is_floating_point():
        meta = meta.float()
    partition = partition_model(model_on_meta(parity), parity.plan(), layout, case, meta)
    return PreparedCase(parity, case, layout, partition, samples)


def model_on_meta(parity: ParityModel) -> nn.Module:
    """Make the model without the values of its parameters. Buffers have theirs."""
    with meta_parameters(keep_values=False):
        return parity.model()


def plan_problems(parity: ParityModel) -> list[str]:
    """Returns what the plan of a model names and the model does not have."""
    return unmatched(parity.plan(), model_on_meta(parity))


def make_batch(parity: ParityModel, data: str, samples: int, step: int = 0) -> dict[str, Tensor]:
    """Returns a step's global batch, which depends only on the step: ``inputs`` and ``targets``.

    Packed, it also has ``starts``: where each token's document begins, (batch, seq). A model with dropout gets the keys
    of its samples, ``keys``.

    Raises:
        ConfigError: the model takes no such data.
    """
    # A step's own seed.
    generator = torch.Generator().manual_seed(SEED + step)
    make = {"packed": parity.documents, "chats": parity.chats}.get(data, parity.batch)
    if make is None:
        raise ConfigError(f"--case {data}: the model takes none (ParityModel); leave it out")
    tensors = make(samples, generator)
    # Without starts, there are only two.
    batch = dict(zip(("inputs", "targets", "starts"), tensors, strict=False))
    if has_dropout(model_on_meta(parity)):
        batch["keys"] = sample_keys(SEED, step, 0, samples)
    return batch


def make_subject_of(ready: PreparedCase, optimizer: str, dtype: str = "fp64", device: str = "cpu") -> Subject:
    """Make what `mmm_verify` compares.

    Args:
        ready: the case.
        optimizer: ``sgd`` or ``adamw``.
        dtype: a key of `DTYPES`.
        device: device type of the ranks. The one device is the CPU.
    """
    # ep has no ranks of its own.
    axes = {axis: size for axis, size in ready.layout.sizes.items() if size > 1}
    subject = make_subject(
        partial(build, ready.parity, DTYPES[dtype]),
        partial(parallelize, ready, optimizer, dtype),
        partial(make_batch, ready.parity, ready.case.data, ready.samples),
        partial(take_step, ready.parity),
        axes or {"dp_shard": 1},
        batch_axes=[axis for axis in axes if axis.startswith("dp")],
        local_batch_fn=partial(own_samples, ready),
        optimizer_fn=partial(make_optimizer, optimizer),
        dtype=DTYPES[dtype],
    )
    # Weights are drawn by name, and so are what dropout drops: the same on the ranks.
    return replace(subject, noise=0.0, keeps_dropout=True, device=device)


def own_samples(ready: PreparedCase, batch: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    """Returns a rank's samples of the global batch: ranks of one data-parallel coordinate have the same."""
    size = ready.samples // ready.layout.dp
    first = ready.layout.dp_coordinate(whoami().rank) * size
    return {name: tensor[first : first + size] for name, tensor in batch.items()}


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make SGD without momentum, or AdamW as PyTorch has it."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.3)
    return torch.optim.AdamW(parameters, lr=1e-2)


def build(parity: ParityModel, dtype: torch.dtype) -> nn.Module:
    """Make the model on one device, with its first weights."""
    model = parity.model()
    # Buffers stay what the constructor has made them.
    init.convert(model, dtype)
    weights.initialize(model, SEED)
    return model


def parallelize(ready: PreparedCase, optimizer: str, dtype: str, model: nn.Module, mesh: Any) -> tuple[Any, ...]:
    """Make what a rank runs: its stages of the model, the `ParallelModel` that has them, and their optimizer.

    A rank draws its own weights, and makes its own mesh: `model` and `mesh` serve only programs that lack them.
    """
    # Warnings of a plan have been printed once, before there were ranks.
    get_logger().setLevel(logging.ERROR)
    parity = ready.parity
    device = choose_device(mesh.device_type, whoami())
    # As a run does, the constructor computes buffers in float32.
    with by_default(torch.float32):
        module = model_on_meta(parity)
        own_mesh = build_mesh(ready.layout, device.type, experts=has_experts(module))
        # None: the package's own cross-entropy, which can be sharded.
        loss = None
        if parity.loss is not None:
            loss = parity.mean_loss
        parallel_model = ParallelModel(
            module,
            parity.plan(),
            own_mesh,
            # Weights and activations in the same dtype: what differs is then the layout's.
            Precision(dtype, DTYPES[dtype], DTYPES[dtype]),
            ready.case,
            ready.partition,
            device=device,
            seed=SEED,
            loss=loss,
        )
    update = make_optimizer(optimizer, parallel_model.parameters())
    return *parallel_model.modules.values(), parallel_model, update


def take_step(parity: ParityModel, program: Any, batch: dict[str, Tensor]) -> Tensor | float:
    """Compute the loss of a batch; on a rank the gradients as well. A collective there."""
    own = _batch_of(batch)
    if isinstance(program, nn.Module):
        if parity.before_step is not None:
            parity.before_step(program)
        output = program(own.inputs, **own.arguments)
        return parity.mean_loss(output, own.targets, int((own.targets != PADDING).sum()))
    *_, parallel_model, _ = program
    # What the last step has counted.
    parallel_model.balance_experts(measured=False)
    device = parallel_model.device
    local = own.to(device)
    # Of all data-parallel ranks.
    local = replace(local, count=parallel_model.count_targets(local.targets))
    local_loss = parallel_model.forward_backward(local)
    # One number of each rank; only the last pipeline stage's are parts of the loss.
    losses = gather_floats([local_loss.item()], device)
    return sum(losses[rank][0] for rank in parallel_model.layout.loss_ranks())


def _batch_of(tensors: dict[str, Tensor]) -> Batch:
    """Make the batch that a model gets, on the host."""
    documents = None
    if "starts" in tensors:
        documents = Documents.of(tensors["starts"])
    targets = tensors["targets"]
    return Batch(tensors["inputs"], targets, targets.numel(), documents=documents, sample_keys=tensors.get("keys"))
