"""Fingerprints of a run's batches, losses, gradients and weights (``--fingerprints``), for ``mmm diverge``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmm.errors import DivergedError
from mmm.history.record.fingerprints import (
    GRADIENT,
    HASH_BITS,
    HASH_COLUMNS,
    INPUTS,
    LOSS,
    NOT_TAKEN,
    OUTPUT,
    TARGETS,
    WEIGHT,
    FingerprintFile,
    Header,
)
from mmm.nn.draw import ShardBox, accum_dtype, canonical_name, full_box
from mmm.parallel.fingerprint import COLUMNS, bit_hash, fingerprint, keys_of, project_dtype, signs_of
from mmm.parallel.local import local_box, to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.blocks import blocks_of, modules_of
from mmm.run.hook import Hook
from mmm.run.rows import on_host
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.torch_private.operators import tree_leaves


class OutputSquares:
    """Sums of squares of what blocks returned on this rank in training, since `take`.

    Over the ranks they add up to the sum for the full output, times the number of ranks that hold the same shard of it,
    whatever shard each rank has.

    Args:
        stages: this rank's modules.
        blocks: blocks of the full model.

    Attributes:
        active: whether outputs are added.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        blocks: Sequence[str],
    ) -> None:
        self.active = False
        # Block → its sum, a scalar.
        self._sums: dict[str, Tensor] = {}
        for block, module in modules_of(stages, blocks):
            add = partial(self._add, block)
            module.register_forward_hook(add)

    def _add(
        self,
        block: str,
        module: nn.Module,
        inputs: Any,
        output: Any,
    ) -> None:
        if not (self.active and module.training):
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                local = to_local(leaf.detach())
                dtype = project_dtype(local)
                norm = torch.linalg.vector_norm(local, dtype=dtype)
                square = norm.square()
                if block in self._sums:
                    square = self._sums[block] + square
                self._sums[block] = square
                # Only the first tensor of a block's output.
                break

    def take(self) -> dict[str, Tensor]:
        """Return the sum of each block, a scalar, and begin the sums anew."""
        sums = self._sums
        self._sums = {}
        return sums


class FingerprintHook(Hook):
    """Takes fingerprints of some steps of a program that checks its gradients, and has a `ParallelModel` as ``model``.

    Args:
        every: number of steps between two fingerprints. None: none are taken.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.fingerprints: Fingerprints | None = None
        # The step whose gradients were taken, and whose weights were not yet.
        self._step: int | None = None

    def loop(self, run: Run) -> None:
        if self.every is not None and not run.comm.dry:
            model = run.objects["model"]
            self.fingerprints = Fingerprints(run, model, self.every, run.first)

    def gradients(self, run: Run, step: Step) -> None:
        if self.fingerprints is None:
            return
        batch = step.batch
        self.fingerprints.gradients(
            step.index,
            step.local_loss,
            batch.inputs,
            batch.targets,
        )
        self._step = step.index

    def finish(self, run: Run, step: Step) -> None:
        self._take_weights()

    def end(self, run: Run, error: BaseException | None) -> None:
        # All ranks raise this error, at the row of the step: so this collective is called on all of them.
        if isinstance(error, DivergedError):
            self._take_weights()

    def _take_weights(self) -> None:
        """Take the weights after the step, if its gradients were taken. A collective."""
        if self.fingerprints is not None and self._step is not None:
            self.fingerprints.weights(self._step)
        self._step = None


class Fingerprints:
    """Takes and writes fingerprints.

    `gradients` is called after a backward, before the gradients are clipped, and `weights` after the optimizer's step.
    Both are called on every rank, and `weights` is a collective.

    Args:
        run: the run.
        model: the model.
        every: number of steps between two fingerprints.
        first: first step that this process makes.

    Attributes:
        named: this rank's parameters, by canonical name.
        entries: what fingerprints are taken of, in the order of a step: batch, outputs, loss, gradients, weights.
    """

    def __init__(
        self,
        run: Run,
        model: ParallelModel,
        every: int,
        first: int,
    ) -> None:
        self.run = run
        self.every = every
        self.named: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            self.named[canonical_name(name)] = parameter
        # The names of all ranks' parameters.
        names = model.names
        blocks = blocks_of(names)
        self._outputs = OutputSquares(model.modules.values(), blocks)
        self.entries = [INPUTS, TARGETS]
        self.entries += [OUTPUT + block for block in blocks]
        self.entries.append(LOSS)
        # Backward makes the gradients of the last layers first.
        self.entries += [GRADIENT + name for name in reversed(names)]
        self.entries += [WEIGHT + name for name in names]
        # Which shard of each parameter this rank has.
        self._boxes: dict[str, ShardBox] = {}
        self._signs: dict[tuple[str, ShardBox], list[Tensor]] = {}
        self._keys: dict[tuple[str, ShardBox], list[Tensor]] = {}
        # The partition whose bits do not depend on the layout; empty if they do.
        self._exact = ""
        if model.techniques.exact is not None:
            self._exact = f"{model.techniques.exact}.1.1"
        self._taken: dict[str, Tensor] = {}
        self._file: FingerprintFile | None = None
        # The next multiple of `every`, from `first` on.
        self._next = first + -first % every
        self._outputs.active = first == self._next

    def gradients(
        self,
        step: int,
        loss: Tensor,
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        """Take the fingerprints of a step's batch, local loss and gradients. The first call is a collective.

        Args:
            step: index of the step.
            loss: this rank's local loss, a scalar.
            inputs, targets: samples of this data-parallel coordinate, (local batch, …).
        """
        if step != self._next:
            return
        if not self._signs:
            self._begin(step, inputs, targets)
        for entry, samples in ((INPUTS, inputs), (TARGETS, targets)):
            box = self._box_of_samples(samples)
            self._take(entry, entry, samples, box)
        for block, squares in self._outputs.take().items():
            # (columns,): an output has only the sum of squares.
            row = squares.new_zeros(COLUMNS + HASH_COLUMNS)
            row[COLUMNS - 1] = squares
            self._taken[OUTPUT + block] = row
        if self._has_loss():
            self._take(LOSS, LOSS, loss, full_box(loss))
        for name, parameter in self.named.items():
            # An expert without tokens has no gradient.
            if parameter.grad is None:
                continue
            box = self._boxes[name]
            self._take(GRADIENT + name, name, parameter.grad, box)

    def weights(self, step: int) -> None:
        """Take the fingerprints of the weights after a step, and write all of the step. A collective."""
        if step != self._next:
            self._outputs.active = self._next == step + 1
            return
        self._next += self.every
        self._outputs.active = self._next == step + 1
        self._take_weights()
        self._write(step)

    def _begin(
        self,
        step: int,
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        """Find out who holds what, and begin the file with the weights as they are now. A collective."""
        # Entry → the shard of it that this rank has.
        boxes = {INPUTS: self._box_of_samples(inputs)}
        boxes[TARGETS] = self._box_of_samples(targets)
        for name, parameter in self.named.items():
            box = local_box(parameter)
            self._boxes[name] = box
            boxes[GRADIENT + name] = box
            boxes[WEIGHT + name] = box
        if self._has_loss():
            layout = self.run.layout
            rank = self.run.rank.rank
            # Each coordinate of dp and cp has one of the summands of the loss.
            cp_coordinate = layout.coordinates(rank)["cp"]
            summand = layout.dp_coordinate(rank) * layout.cp + cp_coordinate
            n_summands = layout.dp * layout.cp
            boxes[LOSS] = ShardBox(
                start=(summand,),
                length=(1,),
                full=(n_summands,),
            )
        replicas = self._count_replicas(boxes)
        by_rank = self.run.comm.gather(boxes)
        outdir = self.run.outdir
        if outdir is not None and self.run.rank.is_main:
            header = Header(
                entries=self.entries,
                columns=COLUMNS,
                exact=self._exact,
                layout=str(self.run.layout),
                dtype=self.run.precision.name,
                ranks=self.run.rank.world_size,
                replicas=replicas.tolist(),
                shards=_numbered(self.entries, by_rank),
            )
            self._file = FingerprintFile(outdir, step, header)
        self._take_weights()
        self._write(step - 1)

    def _count_replicas(self, boxes: Mapping[str, ShardBox]) -> Tensor:
        """How many ranks hold the same shard of each entry, (entries,). A collective.

        It is the number of elements that all ranks hold together, over the number of elements of the full tensor.
        """
        device = self.run.device
        # This rank's fraction of each entry, (entries,).
        local = torch.zeros(len(self.entries), dtype=accum_dtype(device))
        for index, entry in enumerate(self.entries):
            if entry in boxes:
                box = boxes[entry]
                n_local = math.prod(box.length)
                # A tensor may have no elements.
                n_full = max(1, math.prod(box.full))
                local[index] = n_local / n_full
        local = local.to(device)
        total = self.run.comm.sum(local)
        return total.clamp(min=1.0)

    def _has_loss(self) -> bool:
        """Whether this rank is in the last stage."""
        layout = self.run.layout
        coordinates = layout.coordinates(self.run.rank.rank)
        return coordinates["pp"] == layout.pp - 1

    def _box_of_samples(self, samples: Tensor) -> ShardBox:
        """Which samples of the global batch these are."""
        layout = self.run.layout
        local_batch, *sample_shape = samples.shape
        coordinate = layout.dp_coordinate(self.run.rank.rank)
        start = [0] * samples.ndim
        start[0] = coordinate * local_batch
        global_batch = layout.dp * local_batch
        return ShardBox(
            start=tuple(start),
            length=tuple(samples.shape),
            full=(global_batch, *sample_shape),
        )

    def _take_weights(self) -> None:
        for name, parameter in self.named.items():
            box = self._boxes[name]
            self._take(WEIGHT + name, name, parameter, box)

    def _take(
        self,
        entry: str,
        name: str,
        tensor: Tensor,
        box: ShardBox,
    ) -> None:
        """Take the fingerprint of this rank's shard.

        Args:
            entry: what it is a fingerprint of.
            name: the name that signs and keys are drawn from.
            tensor: a tensor, or a DTensor.
            box: where the shard is in the full tensor.
        """
        local = to_local(tensor.detach())
        shard = name, box
        # The same signs and keys serve a weight and its gradient, in all steps.
        if shard not in self._signs:
            self._signs[shard] = signs_of(name, box, local)
            self._keys[shard] = keys_of(name, box, local)
        sums = fingerprint(local, self._signs[shard])
        bits = bit_hash(local, self._keys[shard])
        digits = _digits(bits).to(sums)
        # (COLUMNS + HASH_COLUMNS,)
        self._taken[entry] = torch.cat((sums, digits))

    def _write(self, step: int) -> None:
        """Write what was taken since the last call. A collective."""
        # What this rank does not hold, or has no gradient of, adds nothing to the sums over the ranks.
        device = self.run.device
        lacking = torch.zeros(
            COLUMNS + HASH_COLUMNS,
            dtype=accum_dtype(device),
            device=device,
        )
        not_taken = lacking.clone()
        not_taken[COLUMNS - 1] = NOT_TAKEN
        # The first write, before any step, has only weights.
        only_weights = INPUTS not in self._taken
        rows = []
        for entry in self.entries:
            row = self._taken.get(entry, lacking)
            if only_weights and not entry.startswith(WEIGHT):
                row = not_taken
            rows.append(row.to(lacking))
        self._taken.clear()
        # (entries * columns,)
        flat = torch.stack(rows).flatten()
        # (ranks, entries * columns)
        table = self.run.comm.table(flat)
        if self._file is not None:
            self._file.append(step, on_host(table))


def _digits(bits: Tensor) -> Tensor:
    """The digits of a hash, (HASH_COLUMNS,), the lowest first: float32 holds integers up to 2²⁴ exactly."""
    # (HASH_COLUMNS,): 0, 21, 42
    shifts = HASH_BITS * torch.arange(HASH_COLUMNS, device=bits.device)
    mask = (1 << HASH_BITS) - 1
    return (bits >> shifts) & mask


def _numbered(
    entries: Sequence[str],
    by_rank: Sequence[dict[str, Any]],
) -> list[list[int]]:
    """Which shard each rank holds, (ranks, entries): shards are numbered in the order of ranks; -1 for none.

    Args:
        by_rank: for each rank, entry → box of the shard that it holds.
    """
    shards: list[list[int]] = [[] for _ in by_rank]
    for entry in entries:
        # Box → the number of the shard.
        indices: dict[Any, int] = {}
        for of_rank, boxes in zip(shards, by_rank, strict=True):
            index = -1
            box = boxes.get(entry)
            if box is not None:
                index = indices.setdefault(box, len(indices))
            of_rank.append(index)
    return shards
