"""Fingerprints of a run's batches, losses, gradients and weights (``--fingerprints``), for ``mmm diverge``.

A fingerprint of a tensor is the sum of its elements, the sum of their squares, and a checksum of their bits. Those of
shards add up to that of the full tensor, however it is sharded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmm.errors import DivergedError
from mmm.history.record.fingerprints import GRADIENT, INPUTS, LOSS, TARGETS, WEIGHT, FingerprintFile, Header
from mmm.nn.init import accum_dtype, canonical_name
from mmm.parallel.local import local_box, to_local
from mmm.run.hook import Hook, Loop
from mmm.run.run import Run
from mmm.run.step import Step

# Bytes of an element → the integer of that size.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FingerprintHook(Hook):
    """Takes fingerprints of some steps of a program that checks its gradients, and has a `ParallelModel` as ``model``.

    Args:
        every: number of steps between two fingerprints. None: none are taken.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        # On rank 0 of a run that takes fingerprints.
        self._file: FingerprintFile | None = None
        # This rank's parameters, by the names in the full model.
        self._named: dict[str, Tensor] = {}
        # Entry → fingerprint of this rank's shard, (2,) and ().
        self._taken: dict[str, tuple[Tensor, Tensor]] = {}
        # The step whose gradients were taken, and whose weights were not yet.
        self._step: int | None = None

    def loop(self, run: Run, loop: Loop) -> None:
        if self.every is None or run.comm.dry:
            return
        model = run.objects["model"]
        # Entry → the fraction of the full tensor that this rank holds.
        fractions = {}
        for name, parameter in model.named_parameters():
            name = canonical_name(name)
            self._named[name] = parameter
            box = local_box(parameter)
            n_local = math.prod(box.length)
            n_full = math.prod(box.full)
            # A tensor may have no elements.
            fractions[name] = n_local / max(1, n_full)
        by_rank = run.comm.gather(fractions)
        if run.rank.is_main and run.outdir is not None:
            replicas = {}
            for name in model.names:
                total = 0.0
                for of_rank in by_rank:
                    total += of_rank.get(name, 0.0)
                # A tensor without elements has none.
                replicas[name] = max(1.0, total)
            self._file = FingerprintFile(run.outdir, run.first, _header(run, replicas))
        # The weights that the run begins with.
        self._take_weights(run, run.first - 1)

    def gradients(self, run: Run, step: Step) -> None:
        if not self._named or self.every is None or step.index % self.every:
            return
        self._step = step.index
        self._take(INPUTS, step.batch.inputs)
        self._take(TARGETS, step.batch.targets)
        coordinates = run.layout.coordinates(run.rank.rank)
        # The last stage of a pipeline has the loss.
        if coordinates["pp"] == run.layout.pp - 1:
            self._take(LOSS, step.local_loss)
        for name, parameter in self._named.items():
            # An expert without tokens has no gradient.
            if parameter.grad is not None:
                self._take(GRADIENT + name, parameter.grad)

    def finish(self, run: Run, step: Step) -> None:
        if self._step is not None:
            self._take_weights(run, self._step)

    def end(self, run: Run, error: BaseException | None) -> None:
        # All ranks raise this error, at the row of the step: so this collective is called on all of them.
        if isinstance(error, DivergedError) and self._step is not None:
            self._take_weights(run, self._step)

    def _take_weights(self, run: Run, step: int) -> None:
        """Take the weights after a step, and write what was taken in it. A collective."""
        for name, parameter in self._named.items():
            self._take(WEIGHT + name, parameter)
        all_sums = []
        all_checksums = []
        for sums, bits in self._taken.values():
            all_sums.append(sums)
            all_checksums.append(bits)
        # Two copies to the host: (entries, 2) and (entries,).
        sums_on_host = torch.stack(all_sums).tolist()
        checksums_on_host = torch.stack(all_checksums).tolist()
        values = {}
        for entry, pair, bits in zip(self._taken, sums_on_host, checksums_on_host, strict=True):
            values[entry] = [*pair, bits]
        by_rank = run.comm.gather(values)
        if self._file is not None:
            self._file.append(step, by_rank)
        self._taken.clear()
        self._step = None

    def _take(self, entry: str, tensor: Tensor) -> None:
        local = to_local(tensor.detach())
        self._taken[entry] = _sums(local), checksum(local)


def _header(run: Run, replicas: dict[str, float]) -> Header:
    """Describe a run's fingerprints.

    Args:
        replicas: name of a parameter → number of ranks that hold the same shard of it.
    """
    layout = run.layout
    # Each coordinate of dp has other samples, and each of dp and cp one of the summands of the loss.
    samples = float(run.rank.world_size // layout.dp)
    of_entries = {
        INPUTS: samples,
        TARGETS: samples,
        LOSS: float(layout.tp),
    }
    # Backward makes the gradients of the last layers first.
    for name in reversed(replicas):
        of_entries[GRADIENT + name] = replicas[name]
    for name in replicas:
        of_entries[WEIGHT + name] = replicas[name]
    exact = run.objects["model"].techniques.exact
    return Header(
        layout=str(layout),
        dtype=run.precision.name,
        ranks=run.rank.world_size,
        replicas=of_entries,
        exact=exact,
    )


def _sums(local: Tensor) -> Tensor:
    """The sum of a tensor's elements, and that of their squares: (2,)."""
    dtype = accum_dtype(local.device)
    if local.is_complex():
        local = torch.view_as_real(local)
    if not local.is_floating_point():
        local = local.to(dtype)
    total = local.sum(dtype=dtype)
    norm = torch.linalg.vector_norm(local, dtype=dtype)
    return torch.stack((total, norm.square()))


def checksum(local: Tensor) -> Tensor:
    """A sum over the elements of a tensor, modulo 2⁶⁴, that differs if one bit differs: an int64 scalar."""
    if local.is_complex():
        local = torch.view_as_real(local)
    integer = INTEGERS[local.element_size()]
    bits = local.view(integer)
    # This maps the integers of one size one-to-one. Without it, two rounded elements would often cancel in the sum.
    mixed = bits * (2 * bits + 1)
    return mixed.sum(dtype=torch.int64)
