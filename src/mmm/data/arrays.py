"""Training samples from arrays on disk: HDF5, netCDF-4 or Zarr.

In use::

    fields = Arrays("heat.h5", ["now", "next"])
    batches = ArrayBatches(fields, global_batch, first_sample, local_batch, seed)
    for step in run.steps(batches, steps, samples=global_batch):
        now, following = step.batch

xarray says what a file contains: dimensions, coordinates, and how values are packed. The samples themselves are sliced
from the file by h5py or zarr, because a slice by xarray takes 30 times as much CPU time as one by h5py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmm.data.array_file import ZARR, describe, engine_of, one_line, packing_of, unpack
from mmm.data.local_batches import local_batches
from mmm.data.text.formats import reading
from mmm.data.workers import ErrorsAsValues
from mmm.errors import DataError
from mmm.runtime.log import say_once

# Bytes of decompressed chunks that HDF5 keeps, at least.
CHUNK_CACHE = 1 << 23
Samples = tuple[Tensor, ...]


class Arrays(Dataset[Samples]):
    """A data set whose samples are slices of the variables of a file. The first dimension counts the samples.

    ``arrays[3]`` is the sample 3, one tensor for each variable; ``arrays[[3, 1, 4]]`` is a batch, with a dimension
    (batch, …) in front. Packed values (``scale_factor``, ``add_offset``) are unpacked, and missing values
    (``_FillValue``) become NaN. Integers become int64.

    A rank reads only the samples that it asks for. Each process opens the file for itself, when it first reads: a data
    set can be handed to forked and spawned workers, and be used by several threads.

    Args:
        path: an HDF5 file, a netCDF-4 file, or the folder of a Zarr group that xarray has written.
        variables: names of the variables.
        group: the group of the variables, such as ``"train"``. The default is the root.
        select: which samples: labels of the first dimension's coordinate, both ends included, such as
            ``slice("2000", "2009")`` for a time. If it has no coordinate: positions, such as ``slice(0, 900)``.
        dtype: dtype of floats. None keeps that of the file.
        missing: takes the place of NaN, for example over land. None: a sample with NaN is an error.

    Attributes:
        path: the file.
        variables: names of the variables.
        shapes: shape of a sample of each variable.
        chunk: number of consecutive samples that are compressed together. To read one of them, all are read. 1 if
            samples can be read one by one.

    Raises:
        DataError: the file cannot be read, a variable is missing or holds no numbers, their lengths differ, or no
            sample is selected. When a sample is read: it has NaN or inf, or the file has changed.
    """

    def __init__(
        self,
        path: str | Path,
        variables: Sequence[str],
        *,
        group: str = "/",
        select: slice | None = None,
        dtype: torch.dtype | None = None,
        missing: float | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self.variables = tuple(variables)
        self.group = group
        self.dtype = dtype
        self.missing = missing
        # The process that has opened the file, and the arrays in it.
        self._opened: tuple[int, dict[str, Any]] | None = None
        self._cache_bytes = CHUNK_CACHE
        self._engine = engine_of(self.path)
        self._version = self._version_now()
        self._packing: dict[str, dict[str, Any]] = {}
        with describe(self.path, self._engine, group) as description:
            self._look_at(description)
            # (samples,): where in the file each sample is.
            self._positions = self._select(description, select)
        self._look_at_storage()
        # A worker that is forked later does not inherit an open file.
        self._opened = None

    def __len__(self) -> int:
        return len(self._positions)

    def __repr__(self) -> str:
        samples = f"{len(self):,} samples"
        shapes = zip(self.variables, self.shapes, strict=True)
        variables = ", ".join(f"{name} {shape}" for name, shape in shapes)
        chunks = "each read by itself"
        if self.chunk > 1:
            chunks = f"compressed in chunks of {self.chunk}"
        return f"{self.path}: {samples}, {chunks}: {variables}"

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker gets a copy, and opens the file for itself.
        return {**self.__dict__, "_opened": None}

    def __getitem__(
        self,
        index: int | Sequence[int] | np.ndarray,
    ) -> Samples:
        if isinstance(index, int | np.integer):
            batch = self[[int(index)]]
            return tuple(values[0] for values in batch)
        chosen = np.asarray(index, np.int64)
        positions = self._positions[chosen]
        batch = tuple(self._read(name, positions, chosen) for name in self.variables)
        # Asked after reading: what was read is of the file as it was at the start.
        if self._version_now() != self._version:
            raise DataError(f"{self.path} has changed since it was opened: write to another file, and start again")
        return batch

    def _look_at(self, description: Any) -> None:
        """Check that the variables are there, hold numbers and have one length; keep how they are packed.

        Args:
            description: an xarray ``Dataset``, which has not read any sample.
        """
        lengths = {}
        shapes = []
        for name in self.variables:
            if name not in description.variables:
                names = ", ".join(map(str, description.variables)) or "none"
                raise DataError(
                    f"{self.path} has no variable {name!r} in the group {self.group}; its variables: {names}"
                )
            variable = description.variables[name]
            if not variable.ndim or variable.dtype.kind not in "fiubc":
                raise DataError(
                    f"{self.path}: {name} is {variable.dtype} of shape {variable.shape}, and samples are numbers along "
                    f"a first dimension: leave it out, or write it as such an array"
                )
            lengths[name] = len(variable)
            shapes.append(variable.shape[1:])
            self._packing[name] = packing_of(variable)
        if not lengths:
            raise DataError(f"no variable of {self.path} is named: give the names of one or more")
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
            raise DataError(f"{self.path}: the variables have different numbers of samples: {listed}")
        self.shapes = tuple(shapes)

    def _select(self, description: Any, select: slice | None) -> np.ndarray:
        """The positions in the file of the samples that are selected, (samples,) int64."""
        import xarray

        first = description.variables[self.variables[0]]
        dim = first.dims[0]
        coordinate = None
        if dim in description.coords:
            coordinate = {dim: description.coords[dim]}
        # With the file's coordinate: labels then select positions.
        positions = xarray.DataArray(np.arange(len(first)), dims=dim, coords=coordinate)
        if select is not None:
            try:
                positions = positions.sel({dim: select})
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{self.path}: {select} cannot be selected along {dim}: {one_line(error)}") from None
        if not positions.size:
            described = f"the variables have {len(first):,}"
            if coordinate is not None and len(first):
                labels = coordinate[dim].to_numpy()
                described += f", and {dim} is from {labels[0]} to {labels[-1]}"
            raise DataError(f"{self.path}: there are no samples for select={select}: {described}")
        return positions.to_numpy()

    def _look_at_storage(self) -> None:
        """Check that all samples are written, and find out how many are compressed together."""
        stored = int(self._positions.max()) + 1
        self.chunk = 1
        compressed_bytes = 0
        for name in self.variables:
            array = self._array(name)
            # Along netCDF's unlimited dimension, some variables may be written further than others.
            written = array.shape[0]
            if written < stored:
                raise DataError(f"{self.path}: {name} is written for {written:,} of {stored:,} samples")
            if not array.chunks:
                continue
            # HDF5 can read a part of a chunk that no filter, such as gzip, has changed. Zarr cannot.
            if self._engine != "zarr":
                created_with = array.id.get_create_plist()
                if not created_with.get_nfilters():
                    continue
            self.chunk = max(self.chunk, array.chunks[0])
            chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
            compressed_bytes = max(compressed_bytes, chunk_bytes)
        # Where nothing is compressed, a cache would have HDF5 read whole chunks.
        self._cache_bytes = 0
        if compressed_bytes:
            # HDF5 decompresses a chunk that is larger than its cache anew for every slice.
            self._cache_bytes = max(CHUNK_CACHE, compressed_bytes)

    def _read(
        self,
        name: str,
        positions: np.ndarray,
        chosen: np.ndarray,
    ) -> Tensor:
        """Read samples of a variable, (batch, …).

        Args:
            positions: where in the file they are, (batch,).
            chosen: their indices in this data set, for messages, (batch,).
        """
        array = self._array(name)
        # (batch, …)
        shape = (len(positions), *array.shape[1:])
        raw = np.empty(shape, array.dtype)
        # Read in the order of the file, whatever the order of the batch.
        order = positions.argsort(kind="stable")
        try:
            for begin, end in _spans(positions[order], self.chunk):
                # Of the samples of one slice, their places in the batch.
                places = order[begin:end]
                first = positions[places[0]]
                last = positions[places[-1]]
                values = array[first : last + 1]
                # More than one: in the order of the batch, without those in between.
                if len(values) > 1:
                    offsets = positions[places] - first
                    values = values[offsets]
                raw[places] = values
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            reason = one_line(error)
            raise DataError(f"{self.path}: {name} cannot be read ({reason}): is the file damaged?") from None
        values = self._as_tensor(name, raw)
        # Quick: a sum has NaN or inf if one of its terms has. A sum that overflows is looked at closely, too.
        if not values.sum().isfinite():
            values = self._without_missing(name, values, chosen)
        return values

    def _as_tensor(self, name: str, raw: np.ndarray) -> Tensor:
        """Unpack values as they are in the file."""
        raw = unpack(name, raw, self._packing[name])
        if raw.dtype.kind in "iu":
            raw = raw.astype(np.int64)
        # PyTorch takes only the byte order of the machine.
        native_dtype = raw.dtype.newbyteorder("=")
        native = raw.astype(native_dtype, copy=False)
        values = torch.from_numpy(native)
        if values.is_floating_point() and self.dtype is not None:
            values = values.to(self.dtype)
        return values

    def _without_missing(
        self,
        name: str,
        values: Tensor,
        chosen: np.ndarray,
    ) -> Tensor:
        """Put ``missing`` in the place of NaN. Raises DataError: a sample is still not finite."""
        if self.missing is not None:
            values = values.nan_to_num(
                nan=self.missing,
                posinf=math.inf,
                neginf=-math.inf,
            )
        # (batch, values of a sample)
        flat = values.reshape(len(values), -1)
        # (batch,)
        finite = flat.isfinite().all(1)
        if finite.all():
            return values
        # The first sample that is not finite.
        row = int(finite.int().argmin())
        sample = values[row]
        bad = sample[~sample.isfinite()]
        advice = "give missing=0.0 to replace NaN, or select other samples"
        if not bad.isnan().any():
            advice = "choose a wider dtype, or select other samples"
        count = f"{bad.numel():,} of {sample.numel():,} values"
        raise DataError(
            f"{self.path}: sample {chosen[row]} of {name} has {count} that are not finite, such as {bad[0]}: {advice}"
        )

    def _array(self, name: str) -> Any:
        """A variable in the file: an array of h5py or zarr."""
        opened = self._opened
        process = os.getpid()
        # A forked worker cannot share an open HDF5 file with its parent.
        if opened is None or opened[0] != process:
            opened = (process, self._open())
            # Two threads may both open the file. Each uses its own, and the later one stays.
            self._opened = opened
        return opened[1][name]

    def _open(self) -> dict[str, Any]:
        """Open the file. Arrays stay open, since HDF5 forgets the decompressed chunks of one that is closed."""
        if self._engine == "zarr":
            import zarr

            group = zarr.open_group(self.path, mode="r", path=self.group.strip("/"))
        else:
            import h5py

            try:
                file = h5py.File(self.path, "r", rdcc_nbytes=self._cache_bytes)
                group = file[self.group]
            except OSError as error:
                raise DataError(f"{self.path} cannot be opened: {one_line(error)}") from None
        return {name: group[name] for name in self.variables}

    def _version_now(self) -> tuple[int, int, int]:
        """What tells whether a file is the same as before. Of a Zarr folder: that of its metadata."""
        file = self.path
        if self._engine == "zarr":
            candidates = [self.path / name for name in ZARR]
            file = next(path for path in candidates if path.exists())
        with reading(self.path):
            status = os.stat(file)
        return status.st_ino, status.st_size, status.st_mtime_ns


class ArrayBatches:
    """A rank's batches of `Arrays`, for ``run.steps``: a tensor of (local batch, …) for each variable.

    The samples are those of `mmm.data.local_batches.local_batches`: a function of seed, step and place in the global
    batch, never of the mesh. A resumed run does not read the samples of the steps before.

    Args:
        arrays: the data set.
        global_batch_size: number of samples in a step over all ranks.
        first_sample, size: this rank's samples in each global batch. Data-parallel coordinate c starts at
            ``c * size``.
        seed: seed of the order.
        block: number of consecutive samples that stay close to each other in the shuffled order. 1 shuffles freely.
            If samples are compressed in chunks, a block of one chunk has each chunk read once; but then a global
            batch has samples from only ``global_batch_size / block`` places of the file.
        workers: number of processes that read ahead. 0: the rank reads by itself.

    Attributes:
        steps_per_epoch: number of global batches in an epoch.

    Raises:
        DataError: there are fewer samples than one global batch.
    """

    def __init__(
        self,
        arrays: Arrays,
        global_batch_size: int,
        first_sample: int,
        size: int,
        seed: int,
        *,
        block: int = 1,
        workers: int = 0,
    ) -> None:
        self.arrays = arrays
        self.workers = workers
        self.order = (len(arrays), global_batch_size, first_sample, size, seed, block)
        self.steps_per_epoch = len(arrays) // global_batch_size
        # Refuses a global batch that is too large, before the ranks meet.
        local_batches(*self.order)
        if block == 1 < arrays.chunk:
            say_once(
                f"{arrays.path}: samples are compressed in chunks of {arrays.chunk}, and to read one is to read its "
                f"chunk: block={arrays.chunk} reads each chunk once, and shuffles less (docs/tutorials/hdf5.md)"
            )

    def from_step(self, first: int) -> DataLoader[Samples]:
        """PyTorch's loader of the batches from step `first` on, without end. ``run.steps`` calls this."""
        batches: Iterator[list[int]] = local_batches(*self.order, first_step=first)
        return DataLoader(
            ErrorsAsValues(self.arrays.__getitem__),
            # An item of the data set is a batch already: the sampler yields lists of indices.
            batch_size=None,
            sampler=batches,
            num_workers=self.workers,
            # The loader draws a seed for its workers. It must not advance the generator that the model draws from.
            generator=torch.Generator(),
        )


def _spans(positions: np.ndarray, chunk: int) -> Iterator[tuple[int, int]]:
    """Divide sorted positions into spans that are read as one slice: neighbours, and samples of one chunk.

    Yields:
        First place in `positions`, and the end.
    """
    if not len(positions):
        return
    far = np.diff(positions) > 1
    other_chunk = np.diff(positions // chunk) > 0
    breaks = np.flatnonzero(far & other_chunk) + 1
    edges = [0, *breaks.tolist(), len(positions)]
    yield from pairwise(edges)
