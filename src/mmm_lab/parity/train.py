"""What one rank does: train a model on a layout, and compare it with the reference."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.data import Batch
from mmm.errors import LayoutError
from mmm.layout import Layout
from mmm.nn.attention import Documents
from mmm.nn.draw import canonical_name
from mmm.nn.dropout import sample_keys
from mmm.nn.experts import has_experts
from mmm.nn.meta import meta_parameters
from mmm.parallel.mesh import Mesh, build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import Partition, partition_model
from mmm.parallel.plan import unmatched
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.runtime.device import Precision, choose_device
from mmm.runtime.log import get_logger, ignore_views
from mmm.runtime.process_group import gather_floats, process_group
from mmm.runtime.ranks import Rank
from mmm.torch_private.groups import ignore_gathers_in_turns
from mmm.traffic.count import count_traffic
from mmm.traffic.formulas import expected_traffic
from mmm_lab.parity.layouts import ParityCase, layout_of
from mmm_lab.parity.optimizers import make_optimizer
from mmm_lab.parity.parity_model import ParityModel
from mmm_lab.parity.reference import DTYPES, WITH_PADDING, Reference, Training, batch
from mmm_verify.difference import relative, scale_of, size_of, worst

ROUNDING = 16  # roundings of the model's largest gradient: one that is no larger is 0


@dataclass(frozen=True)
class PreparedCase:
    """A case that has been checked, before any rank is started.

    Attributes:
        case: the case, with the number of micro-batches.
        partition: which parts of the model are in which pipeline stage.
        experts: the model has some.
    """

    parity: ParityModel
    case: ParityCase
    training: Training
    layout: Layout
    partition: Partition
    experts: bool


@dataclass(frozen=True)
class Curve:
    """What a rank keeps of one training.

    Attributes:
        losses: loss of each step.
        differences: max|g - g₀| / max|g₀| of each gradient of step 1 that this rank has, sharded or full, by name.
        seconds: seconds of all steps.
        sent: bytes that this rank handed to process groups in step 2, by the best algorithms (`mmm.traffic.count`).
            None with one step.
        expected: bytes that the layout needs at least (`mmm.traffic.formulas`). None where there is no formula.
    """

    losses: list[float]
    differences: dict[str, float]
    seconds: float
    sent: int | None
    expected: float | None


def prepare(parity: ParityModel, case: ParityCase, training: Training) -> PreparedCase:
    """Check that a model can be put on a layout. Needs no process group.

    Raises:
        UserError: it cannot; with the reason.
    """
    layout = layout_of(case.sizes).fit(case.ranks)
    if training.global_batch % layout.dp:
        raise LayoutError(
            f"layout {case.layout}: the global batch of {training.global_batch} samples does not divide over "
            f"{layout.dp} data-parallel coordinates: change --global_batch_size, or dp"
        )
    microbatches = None
    samples = training.global_batch // layout.dp
    if layout.pp == 1:
        microbatches = min(parity.least_microbatches, samples)
    elif case.schedule in SCHEDULES:
        # The fewest that keep the stages busy.
        fewest, *_ = SCHEDULES[case.schedule].microbatches(layout.pp)
        microbatches = max(parity.least_microbatches, fewest)
    case = replace(case, microbatches=microbatches)
    inputs, *_ = batch(parity, training, 0)
    # The first data-parallel rank's samples, without values.
    meta = inputs[:samples].to("meta")
    # The model is in float32 here.
    if meta.is_floating_point():
        meta = meta.float()
    module = _model_on_meta(parity)
    partition = partition_model(module, parity.plan(), layout, case, meta)
    return PreparedCase(parity, case, training, layout, partition, has_experts(module))


def _model_on_meta(parity: ParityModel) -> nn.Module:
    """Make the model without the values of its parameters. Buffers have theirs."""
    with meta_parameters(keep_values=False):
        return parity.model()


def plan_problems(parity: ParityModel) -> list[str]:
    """Returns what the plan of a model names and the model does not have."""
    return unmatched(parity.plan(), _model_on_meta(parity))


def train(
    rank: Rank, ready: PreparedCase, references: Mapping[str, Reference], timeout: float, device_type: str = "cpu"
) -> list[Curve]:
    """Train once for each optimizer of the case, in one process group. A collective of all ranks."""
    device = choose_device(device_type, rank)
    logger = get_logger()
    level = logger.level
    # Warnings of a plan have been printed once, before there were ranks.
    logger.setLevel(logging.ERROR)
    try:
        with process_group(rank, device, timeout), ignore_views():
            mesh = build_mesh(ready.layout, device.type, timeout, experts=ready.experts)
            return [_train(rank, ready, mesh, device, name, references[name]) for name in ready.case.optimizers]
    finally:
        logger.setLevel(level)


def _train(
    rank: Rank, ready: PreparedCase, mesh: Mesh, device: torch.device, optimizer: str, reference: Reference
) -> Curve:
    began = time.perf_counter()
    parity = ready.parity
    training = ready.training
    layout = ready.layout
    dtype = DTYPES[training.dtype]
    module = _model_on_meta(parity)
    # Weights and activations in the same dtype: what differs is then the layout's.
    precision = Precision(training.dtype, dtype, dtype)
    # None: the package's own cross-entropy, which can be sharded.
    loss = None
    if parity.loss is not None:
        loss = parity.mean_loss
    parallel_model = ParallelModel(
        module,
        parity.plan(),
        mesh,
        precision,
        ready.case,
        ready.partition,
        device=device,
        seed=training.seed,
        loss=loss,
    )
    expected = least_traffic(ready, parallel_model, precision)
    update = make_optimizer(optimizer, parallel_model.parameters())
    sent = None
    # This rank's samples of the global batch: ranks of one data-parallel coordinate have the same.
    size = training.global_batch // layout.dp
    first_sample = layout.dp_coordinate(rank.rank) * size
    own = slice(first_sample, first_sample + size)
    losses = []
    differences = {}
    for step in range(training.steps):
        inputs, targets, *documents = batch(parity, training, step)
        own_targets = targets[own].to(device)
        count: int | Tensor = targets.numel()
        if training.data in WITH_PADDING:
            # A collective: the targets of all data-parallel ranks.
            count = parallel_model.count_targets(own_targets)
        local_batch = Batch(inputs[own].to(device), own_targets, count)
        if documents:
            on_host = Documents.of(documents[0][own])
            on_device = Documents(*(tensor.to(device) for tensor in on_host))
            local_batch = replace(local_batch, documents=on_device)
        if parallel_model.has_dropout:
            keys = sample_keys(training.seed, step, first_sample, size, device)
            local_batch = replace(local_batch, sample_keys=keys)
        # The first step of a pipeline, or of DDP, sends more than the others.
        with count_traffic(mesh) if step == 1 else nullcontext() as traffic:
            local_loss = parallel_model.forward_backward(local_batch)
            if step == 0:
                differences = gradient_differences(parallel_model, reference.gradients)
            update.step()
        if traffic is not None:
            sent = traffic.sent
        update.zero_grad()
        parallel_model.balance_experts()
        # One number of each rank; only the last pipeline stage's are parts of the loss.
        local_losses = gather_floats([local_loss.item()], device)
        losses.append(sum(local_losses[loss_rank][0] for loss_rank in layout.loss_ranks()))
    return Curve(losses, differences, time.perf_counter() - began, sent, expected)


def least_traffic(ready: PreparedCase, parallel_model: ParallelModel, precision: Precision) -> float | None:
    """Returns the bytes that this rank has to send in a step. None where there is no formula.

    There is none for experts, whose tokens go where the router sends them, nor for layers whose forward is repeated.
    """
    if ready.experts or ready.case.checkpointing != "none":
        return None
    module = _model_on_meta(ready.parity)
    inputs, *_ = batch(ready.parity, ready.training, 0)
    try:
        by_axis = expected_traffic(
            module,
            ready.parity.plan(),
            ready.layout,
            ready.case,
            ready.partition,
            parallel_model.modules,
            batch=ready.training.global_batch // ready.layout.dp,
            seq_length=inputs.shape[1],
            precision=precision,
        )
    except ValueError:
        # "no formula for …"
        return None
    return sum(by_axis.values())


def gradient_differences(parallel_model: ParallelModel, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns max|g - g₀| / max|g₀| of each gradient that this rank has. A collective: sharded ones are gathered.

    A gradient that is 0 but for rounding (a key's bias moves all scores of a token alike, which softmax does not see)
    has no size of its own: it is measured against the largest gradient of the model. One that is missing, and one of a
    parameter that the reference does not have, are infinitely far off.
    """
    # It warns that two collectives gather what FSDP shards over tp's shards: they do, once.
    ignore_gathers_in_turns()
    largest = worst(size_of(gradient) for gradient in expected.values())
    differences = {}
    for full_name, parameter in parallel_model.named_parameters():
        name = canonical_name(full_name)
        gradient = parameter.grad
        if gradient is None and name not in expected and not parameter.requires_grad:
            # Frozen here, and in the reference.
            continue
        # All ranks of its mesh gather it.
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if gradient is None or name not in expected or gradient.shape != expected[name].shape:
            differences[name] = math.inf
            continue
        nothing = ROUNDING * torch.finfo(gradient.dtype).eps
        scale = scale_of(expected[name], largest, nothing)
        difference = relative(gradient.cpu(), expected[name], scale)
        # The worst of a tied weight that is in two stages of this rank.
        differences[name] = worst((difference, differences.get(name, 0.0)))
    return differences
