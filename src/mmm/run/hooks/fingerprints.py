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
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.fingerprint import COLUMNS, fingerprint, project_dtype, signs_of
from mmm.parallel.local import local_box, to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.hook import Hook
from mmm.run.rows import on_host
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.torch_private.operators import tree_leaves


def blocks_of(names: Iterable[str]) -> list[str]:
    """The parts of a model that have parameters, and of lists their elements, in the order of `names`."""
    blocks = dict[str, None]()
    for name in names:
        first, *rest = name.split(".")[:-1] or [""]
        blocks[f"{first}.{rest[0]}" if rest and rest[0].isdecimal() else first] = None
    return [block for block in blocks if block]


class OutputSquares:
    """The sums of squares of what blocks returned on this rank in training, since `take`. Over the ranks they add up to
    that of the full output, times the ranks that hold the same part of it, whatever part each has.

    Args:
        stages: this rank's modules. blocks: of the full model.
    """

    def __init__(self, stages: Iterable[nn.Module], blocks: Sequence[str]) -> None:
        self.active = False
        self._sums: dict[str, Tensor] = {}
        for stage in map(unwrapped, stages):
            modules = {canonical_name(name): module for name, module in reversed(list(stage.named_modules()))}
            for block in blocks:
                if block in modules:  # the outermost of a name
                    modules[block].register_forward_hook(partial(self._add, block))

    def _add(self, block: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if self.active and module.training and tensors:
            local = to_local(tensors[0].detach())
            square = torch.linalg.vector_norm(local, dtype=project_dtype(local)).square()
            self._sums[block] = self._sums[block] + square if block in self._sums else square

    def take(self) -> dict[str, Tensor]:
        """By block, scalars."""
        sums, self._sums = self._sums, {}
        return sums


class FingerprintHook(Hook):
    """Takes fingerprints of some steps of a program that checks its gradients, and has a `ParallelModel` as ``model``.

    Args:
        every: steps between two. None: there are none.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.fingerprints: Fingerprints | None = None
        self._step: int | None = None  # whose weights are still to be taken

    def loop(self, run: Run) -> None:
        if self.every is not None and not run.comm.dry:
            self.fingerprints = Fingerprints(run, run.objects["model"], self.every, run.first)

    def gradients(self, run: Run, step: Step) -> None:
        if self.fingerprints is not None:
            batch = step.batch
            self.fingerprints.gradients(step.number, step.local_loss, batch.inputs, batch.targets)
            self._step = step.number

    def finish(self, run: Run, step: Step) -> None:
        self._take_weights()

    def end(self, run: Run, error: BaseException | None) -> None:
        if isinstance(error, DivergedError):  # all ranks have it, at the row of the step
            self._take_weights()

    def _take_weights(self) -> None:
        """A collective."""
        if self.fingerprints is not None and self._step is not None:
            self.fingerprints.weights(self._step)
        self._step = None


class Fingerprints:
    """Takes and writes them: `gradients` after a backward, before the gradients are clipped, and `weights` after the
    optimizer. Both are called on every rank, and `weights` is a collective.

    Args:
        every: steps between two.
        first: the step that this process begins with.
    """

    def __init__(self, run: Run, model: ParallelModel, every: int, first: int) -> None:
        self.run, self.every = run, every
        self.named, names = {canonical_name(name): p for name, p in model.named_parameters()}, model.names
        blocks = blocks_of(names)
        self._outputs = OutputSquares(model.modules.values(), blocks)
        self.entries = [INPUTS, TARGETS, *(OUTPUT + block for block in blocks), LOSS]
        self.entries += [GRADIENT + name for name in reversed(names)] + [WEIGHT + name for name in names]
        self._boxes: dict[str, ShardBox] = {}  # by parameter
        self._signs: dict[tuple[str, ShardBox], list[Tensor]] = {}
        self._taken: dict[str, Tensor] = {}
        self._file: FingerprintFile | None = None
        self._next = first + -first % every
        self._outputs.active = first == self._next

    def gradients(self, step: int, loss: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Of a step's batch, local loss and gradients. At the first one a collective.

        Args:
            loss: this rank's local loss.
            inputs, targets: (local batch, …), of this data-parallel coordinate.
        """
        if step != self._next:
            return
        if not self._signs:
            self._begin(step, inputs, targets)
        for entry, samples in ((INPUTS, inputs), (TARGETS, targets)):
            self._take(entry, entry, samples, self._box_of_samples(samples))
        for block, squares in self._outputs.take().items():
            self._taken[OUTPUT + block] = torch.cat((squares.new_zeros(COLUMNS - 1), squares.view(1)))
        if self._has_loss():
            self._take(LOSS, LOSS, loss, full_box(loss))
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                self._take(GRADIENT + name, name, parameter.grad, self._boxes[name])

    def weights(self, step: int) -> None:
        """Of the weights after a step; and write what was taken of it. A collective."""
        if step != self._next:
            self._outputs.active = self._next == step + 1
            return
        self._next += self.every
        self._outputs.active = self._next == step + 1
        self._take_weights()
        self._write(step)

    def _begin(self, step: int, inputs: Tensor, targets: Tensor) -> None:
        """Find out who holds what, and begin the file, with the weights as they are. A collective."""
        boxes = {INPUTS: self._box_of_samples(inputs), TARGETS: self._box_of_samples(targets)}
        for name, parameter in self.named.items():
            self._boxes[name] = boxes[GRADIENT + name] = boxes[WEIGHT + name] = local_box(parameter)
        if self._has_loss():
            layout, rank = self.run.layout, self.run.rank.rank
            part = layout.dp_coordinate(rank) * layout.cp + layout.coordinates(rank)["cp"]
            boxes[LOSS] = ShardBox((part,), (1,), (layout.dp * layout.cp,))
        self._replicas = self._count_replicas(boxes)
        by_rank = self.run.comm.gather(boxes)
        if self.run.outdir is not None and self.run.rank.is_main:
            header = Header(
                entries=self.entries,
                columns=COLUMNS,
                layout=str(self.run.layout),
                dtype=self.run.precision.name,
                ranks=self.run.rank.world_size,
                replicas=self._replicas.tolist(),
                shards=_numbered(self.entries, by_rank),
            )
            self._file = FingerprintFile(self.run.outdir, step, header)
        self._take_weights()
        self._write(step - 1)

    def _count_replicas(self, boxes: Mapping[str, ShardBox]) -> Tensor:
        """(entries,): the ranks that hold the same shard of each, by the elements of all ranks. A collective."""
        local = torch.zeros(len(self.entries), dtype=accum_dtype(self.run.device))
        for index, entry in enumerate(self.entries):
            if entry in boxes:
                local[index] = math.prod(boxes[entry].length) / max(1, math.prod(boxes[entry].full))
        total = self.run.comm.sum(local.to(self.run.device))
        return total.clamp(min=1.0)

    def _has_loss(self) -> bool:
        layout = self.run.layout
        return layout.coordinates(self.run.rank.rank)["pp"] == layout.pp - 1

    def _box_of_samples(self, samples: Tensor) -> ShardBox:
        first = self.run.layout.dp_coordinate(self.run.rank.rank) * len(samples)
        start = (first, *(0 for _ in samples.shape[1:]))
        return ShardBox(start, tuple(samples.shape), (len(samples) * self.run.layout.dp, *samples.shape[1:]))

    def _take_weights(self) -> None:
        for name, parameter in self.named.items():
            self._take(WEIGHT + name, name, parameter, self._boxes[name])

    def _take(self, entry: str, name: str, tensor: Tensor, box: ShardBox) -> None:
        local = to_local(tensor.detach())
        if (name, box) not in self._signs:
            self._signs[name, box] = signs_of(name, box, local)
        self._taken[entry] = fingerprint(local, self._signs[name, box])

    def _write(self, step: int) -> None:
        """What was taken since the last one. A collective."""
        dtype, device = accum_dtype(self.run.device), self.run.device
        lacking = torch.zeros(COLUMNS, dtype=dtype, device=device)  # here, or without gradient
        not_taken = torch.tensor([0.0] * (COLUMNS - 1) + [NOT_TAKEN]).to(lacking)
        others = lacking if INPUTS in self._taken else not_taken
        default = {entry: lacking if entry.startswith(WEIGHT) else others for entry in self.entries}
        table = torch.stack([self._taken.get(entry, default[entry]).to(lacking) for entry in self.entries])
        self._taken.clear()
        table = self.run.comm.table(table.flatten())
        if self._file is not None:
            self._file.append(step, on_host(table))


def _numbered(entries: Sequence[str], by_rank: Sequence[dict[str, Any]]) -> list[list[int]]:
    """(ranks, entries): which shard each rank holds, numbered in the order of ranks; -1 for none."""
    shards = []
    for entry in entries:
        numbers: dict[Any, int] = {}
        own = [held.get(entry) for held in by_rank]
        shards.append([-1 if shard is None else numbers.setdefault(shard, len(numbers)) for shard in own])
    return [list(of_rank) for of_rank in zip(*shards, strict=True)]
