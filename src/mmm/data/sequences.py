"""Pairs and sequences of time steps, from one file of arrays or from many: the samples of a forecast."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmm.data.arrays import Arrays, Samples, indices_of
from mmm.errors import DataError
from mmm.runtime.log import say_once
from mmm.units import counted


class Sequences(Dataset[Samples]):
    """A data set whose samples are the fields at t, t + lead, t + 2 · lead, … of the same variables.

    In use::

        fields = Sequences(Arrays("era5.nc", ["t2m"]), lead=6)
        (t2m,) = fields[[3, 1, 4]]
        now, later = t2m.unbind(1)

    A sample is one tensor for each variable, (steps, …), and a batch is (batch, steps, …). `ArrayBatches` takes it in
    the place of `Arrays`.

    A sample lies within the selection of its `Arrays` as a whole. So no field of a training sample is in the test set,
    if their selections do not overlap.

    Samples may begin in one file and end in the next, but never span a gap: where the time between two neighbours
    differs from the usual one by more than half of it. (Months may have 28 to 31 days.) A note says how many samples
    that leaves out. If the files have no coordinate, every step counts as one after the other.

    Args:
        arrays: the fields by time, or those of several files, in order of time.
        lead: time steps of the file between two fields of a sample.
        steps: number of fields in a sample; 2 for a pair.

    Attributes:
        path: the first file.
        shapes: shape of a sample of each variable, (steps, …).
        chunk: number of consecutive time steps that are compressed together, at most.

    Raises:
        DataError: the files differ in variables or shapes, times do not increase, or there are too few time steps in a
            row for a sample. When a sample is read: as `Arrays`.
    """

    def __init__(
        self,
        arrays: Arrays | Sequence[Arrays],
        *,
        lead: int = 1,
        steps: int = 2,
    ) -> None:
        self.files = [arrays] if isinstance(arrays, Arrays) else list(arrays)
        if not self.files:
            raise DataError("Sequences of no file: give the Arrays of one or more")
        if lead < 1 or steps < 1:
            raise DataError(f"lead={lead}, steps={steps}: both are at least 1")
        first = self.files[0]
        for file in self.files:
            if (file.variables, file.shapes, file.parts) != (first.variables, first.shapes, first.parts):
                raise DataError(f"{first}, and {file}: give files with the same variables, shapes and parts")
        self.path = first.path
        self.shapes = tuple((steps, *shape) for shape in first.shapes)
        self.chunk = max(file.chunk for file in self.files)
        # (files + 1,): the first time step of each file, counted over all files, and the end.
        self._edges = np.cumsum([0, *map(len, self.files)])
        # (steps,): the fields of a sample, counted from its first.
        self._offsets = lead * np.arange(steps)
        span = lead * (steps - 1)
        n = int(self._edges[-1])
        gaps = np.zeros(n - 1, bool)
        # A sample of one field spans nothing.
        if span:
            gaps = self._gaps()
        # (n,): how many gaps there are before each time step.
        before = np.concatenate(([0], np.cumsum(gaps)))
        # (samples,): the first time step of each sample. Without a gap inside, as many are before its end.
        self._starts = np.flatnonzero(before[span:] == before[: max(n - span, 0)])
        if not len(self._starts):
            raise DataError(
                f"{self.path}: a sample of steps={steps} with lead={lead} takes {span + 1} time steps in a row, and "
                f"there are {n} with {counted(int(gaps.sum()), 'gap')}: use a smaller lead or fewer steps"
            )
        left_out = n - span - len(self._starts)
        if left_out:
            say_once(f"{self.path}: {counted(left_out, 'sample')} would span a gap in time, and are left out")

    def _gaps(self) -> np.ndarray:
        """Whether there is a gap after a time step, for all but the last: (n - 1,) bool."""
        labels = [file.labels() for file in self.files]
        n = int(self._edges[-1])
        without = [str(file.path) for file, own in zip(self.files, labels, strict=True) if own is None]
        if len(without) == len(self.files) or n < 2:
            return np.zeros(n - 1, bool)
        if without:
            raise DataError(f"{without[0]} has no times, and other files have: write them all with a time, or none")
        try:
            times: np.ndarray = np.concatenate(labels)  # type: ignore[arg-type]
            # (n - 1,)
            steps = np.diff(times)
            wrong = np.flatnonzero(~(steps > 0 * steps[0]))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.path}: its times cannot be compared ({error}): use one calendar in all files"
            ) from None
        if len(wrong):
            i = int(wrong[0])
            place = int(np.searchsorted(self._edges, i + 1, "right")) - 1
            raise DataError(
                f"{self.files[place].path}: {times[i + 1]} comes after {times[i]}: give files in order of time that do "
                "not overlap"
            )
        usual = np.sort(steps)[len(steps) // 2]
        # Without halves, which dates of some calendars do not have.
        gaps: np.ndarray = (2 * steps > 3 * usual) | (2 * steps < usual)
        return gaps

    def __len__(self) -> int:
        return len(self._starts)

    def __repr__(self) -> str:
        n = int(self._edges[-1])
        files = counted(len(self.files), "file")
        return f"{len(self):,} samples at t + {self._offsets.tolist()}, of {n:,} time steps in {files}"

    def digest(self) -> str:
        """A hash of what the ranks have to have in common: the files, and which of their time steps are in a sample."""
        facts = ([file.digest() for file in self.files], self._offsets.tolist())
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(self._starts.tobytes())
        return digest.hexdigest()

    def __getitem__(self, index: int | slice | Sequence[int] | np.ndarray | Tensor) -> Samples:
        chosen = indices_of(index, self.path, len(self))
        if chosen.ndim == 0:
            batch = self[chosen[None]]
            return tuple(values[0] for values in batch)
        # (batch, steps)
        wanted = self._starts[chosen][:, None] + self._offsets
        # A field that several samples have is read once: (fields,), in order of time.
        fields, places = np.unique(wanted, return_inverse=True)
        # Where the fields of each file begin: (files + 1,)
        cuts = np.searchsorted(fields, self._edges)
        parts = []
        for i, file in enumerate(self.files):
            own = fields[cuts[i] : cuts[i + 1]]
            if len(own) or not len(fields):
                parts.append(file[own - self._edges[i]])
        # By file and variable → by variable: (fields, …), then (batch, steps, …)
        return tuple(torch.cat(values)[places.reshape(wanted.shape)] for values in zip(*parts, strict=True))
