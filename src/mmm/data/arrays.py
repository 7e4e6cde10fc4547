"""Training samples from arrays on disk: HDF5, netCDF-4 or Zarr.

In use::

    fields = Arrays("heat.h5", ["now", "next"])
    batches = ArrayBatches(fields, global_batch, first_sample, local_batch, seed)
    for step in run.steps(batches, steps, samples=global_batch):
        now, following = step.batch

`mmm.data.array_file` says what a file contains. The samples themselves are sliced from the file by h5py or zarr,
because a slice by xarray takes 30 times as much CPU time as one by h5py.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmm.data.array_file import (
    ZARR,
    Variable,
    engine_of,
    labels_of,
    one_line,
    open_group,
    read_variable,
    read_zarr_variables,
)
from mmm.data.array_storage import missing_in_hdf5, missing_in_zarr
from mmm.data.array_values import Meaning, meaning_of
from mmm.data.local_batches import local_batches
from mmm.data.text.formats import reading
from mmm.data.text.token_file import fingerprint
from mmm.data.workers import ErrorsAsValues
from mmm.errors import DataError
from mmm.runtime.log import say_once

# Bytes of decompressed chunks that HDF5 keeps, at least.
CHUNK_CACHE = 1 << 23
INT64_MAX = (1 << 63) - 1
Samples = tuple[Tensor, ...]


class Arrays(Dataset[Samples]):
    """A data set whose samples are slices of the variables of a file. The first dimension counts the samples.

    ``arrays[3]`` is the sample 3, one tensor for each variable; ``arrays[[3, 1, 4]]`` is a batch, with a dimension
    (batch, …) in front. A mask of booleans, or a slice, is taken as NumPy takes it. Packed values (``scale_factor``,
    ``add_offset``) are unpacked, and missing values become NaN: those equal to ``_FillValue`` or ``missing_value``,
    those out of the valid range (``valid_min``, ``valid_max``, ``valid_range``), and in a file that a netCDF library
    has written also those equal to netCDF's default fill value, if there is no ``_FillValue``. Integers become int64.

    A rank reads only the samples that it asks for. Each process opens the file for itself, when it first reads: a data
    set can be handed to forked and spawned workers, and be used by several threads.

    Args:
        path: an HDF5 file, a netCDF-4 file, or the folder of a Zarr group that xarray has written.
        variables: names of the variables.
        group: the group of the variables, such as ``"train"``. The default is the root.
        select: which samples: labels of the first dimension's coordinate, both ends included, such as
            ``slice("2000", "2009")`` for a time. The coordinate may stand in a group above. If there is none:
            positions, such as ``slice(0, 900)``. Calendars other than the standard one need ``mmm[calendars]``.
        dtype: dtype of floats. None keeps that of the file.
        missing: takes the place of missing values and NaN, for example over land. None: a sample that has one is an
            error.
        parts: which part of each sample of a variable is read, a slice for each of its first dims: with
            ``{"now": (slice(None), slice(0, 90))}`` 90 rows of (channels, rows, columns). Variables that it does not
            name are read whole.

    Attributes:
        path: the file.
        variables: names of the variables.
        shapes: shape of a sample of each variable, as it is read.
        chunk: number of consecutive samples that are compressed together. To read one of them, all are read. 1 if
            samples can be read one by one.

    Raises:
        DataError: the file cannot be read, a variable is missing or holds no numbers, their lengths or first
            dimensions differ, no sample is selected, a selected one is not stored, or a part does not lie in a sample.
            When a sample is read: it has NaN or inf, or the file has changed.
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
        parts: Mapping[str, tuple[slice, ...]] | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self.variables = tuple(variables)
        self.group = group
        self.dtype = dtype
        self.missing = missing
        self.parts = dict(parts or {})
        # The process that has opened the file, and the arrays in it.
        self._opened: tuple[int, dict[str, Any]] | None = None
        self._cache_bytes = CHUNK_CACHE
        self._engine = engine_of(self.path)
        self._version = self._version_now()
        self._meanings: dict[str, Meaning] = {}
        described = self._read_variables()
        self._look_at(described)
        # (samples,): where in the file each sample is.
        self._positions = self._select(described, select)
        self._look_at_storage(described)

    def __len__(self) -> int:
        return len(self._positions)

    def __repr__(self) -> str:
        shapes = zip(self.variables, self.shapes, strict=True)
        variables = ", ".join(f"{name} {shape}" for name, shape in shapes)
        chunks = f"compressed in chunks of {self.chunk}" if self.chunk > 1 else "each read by itself"
        return f"{self.path}: {len(self):,} samples, {chunks}: {variables}"

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker gets a copy, and opens the file for itself.
        return {**self.__dict__, "_opened": None}

    def __getitem__(
        self,
        index: int | slice | Sequence[int] | np.ndarray | Tensor,
    ) -> Samples:
        chosen = indices_of(index, self.path, len(self))
        if chosen.ndim == 0:
            batch = self[chosen[None]]
            return tuple(values[0] for values in batch)
        positions = self._positions[chosen]
        batch = tuple(self._read(name, positions, chosen) for name in self.variables)
        # Asked after reading: what was read is of the file as it was at the start.
        if self._version_now() != self._version:
            raise DataError(f"{self.path} has changed since it was opened: write to another file, and start again")
        return batch

    def labels(self) -> np.ndarray | None:
        """The labels of the samples, such as their times, (samples,). None: the file has none.

        Raises:
            DataError: they cannot be decoded.
        """
        labels = labels_of(self.path, _named(self._read_variables()))
        if labels is None:
            return None
        values: np.ndarray = labels.to_numpy()[self._positions]
        return values

    def digest(self) -> str:
        """A hash of what the ranks have to have in common: the file, what it says of the variables, the selection."""
        # A Zarr folder has as many files as chunks: what it says of itself has to do.
        content = "" if self._engine == "zarr" else fingerprint(self.path)
        # Ranks may read other parts of the samples.
        facts = (self.variables, self._stored, self._meanings, self.dtype, self.missing, content)
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(self._positions.tobytes())
        return digest.hexdigest()

    def _read_variables(self) -> dict[str, Variable]:
        """What the file says of the variables, by name. Each has its open array."""
        if not self.variables:
            raise DataError(f"no variable of {self.path} is named: give the names of one or more")
        if self._engine == "zarr":
            return read_zarr_variables(self.path, self.group, self.variables)
        group = open_group(self.path, self.group, self._cache_bytes)
        return {name: read_variable(self.path, group, name) for name in self.variables}

    def _look_at(self, variables: dict[str, Variable]) -> None:
        """Check that the variables hold numbers, and have one first dimension; find out what their values mean."""
        for name, variable in variables.items():
            array = variable.array
            units = str(variable.attributes.get("units"))
            if not array.ndim or array.dtype.kind not in "fiubc" or " since " in units:
                raise DataError(
                    f"{self.path}: {name} is {array.dtype} of shape {array.shape}, units: {units}; and samples are "
                    f"numbers along a first dimension, and no times: leave it out, or write it anew"
                )
            self._meanings[name] = meaning_of(self.path, name, variable)
        lengths = {variable.length for variable in variables.values()}
        dims = {variable.dim for variable in variables.values()} - {""}
        if len(lengths) > 1 or len(dims) > 1:
            listed = []
            for name, variable in variables.items():
                listed.append(f"{name} has {variable.length:,} along {variable.dim or 'no name'}")
            raise DataError(
                f"{self.path}: the first dimensions of the variables differ, so one sample is not that of another: "
                f"{', '.join(listed)}; read each by itself, or write them along one dimension"
            )
        self._stored = [(variable.array.shape[1:], str(variable.array.dtype)) for variable in variables.values()]
        unknown = self.parts.keys() - variables.keys()
        if unknown:
            raise DataError(f"{self.path}: parts has {', '.join(sorted(unknown))}, which is none of the variables read")
        self.shapes = tuple(self._shape_of(name, variable.array) for name, variable in variables.items())

    def _shape_of(self, name: str, array: Any) -> tuple[int, ...]:
        """Shape of what is read of a sample. Raises DataError: the part does not lie in the sample."""
        shape = array.shape[1:]
        slices = self.parts.get(name, ())
        fits = len(slices) <= len(shape)
        lengths = []
        for length, places in zip(shape, slices, strict=False):
            read = range(length)[places]
            lengths.append(len(read))
            # NumPy would cut off what lies behind the end, and HDF5 cannot read backwards.
            fits = fits and len(read) > 0 and read.step > 0 and (places.stop or 0) <= length
        if not fits:
            raise DataError(
                f"{self.path}: a sample of {name} is of shape {shape}, in which its part {slices} does not lie: give a "
                f"slice forwards for each of its first dims"
            )
        return (*lengths, *shape[len(slices) :])

    def _select(self, variables: dict[str, Variable], select: slice | None) -> np.ndarray:
        """The positions in the file of the samples that are selected, (samples,) int64."""
        variable = _named(variables)
        positions = np.arange(variable.length)
        described = f"the variables have {variable.length:,}"
        if select is not None:
            if not isinstance(select, slice):
                raise DataError(f"{self.path}: select={select!r} is no slice: give one, such as slice(0, 900)")
            index = labels_of(self.path, variable)
            described += "; the file has no labels: select by positions"
            if index is not None and len(index):
                described = f"{index.name} is from {index[0]} to {index[-1]}, in {variable.length:,} samples"
                if not index.is_monotonic_increasing and not index.is_monotonic_decreasing:
                    raise DataError(
                        f"{self.path}: the labels of {index.name} are not in order, so {select} would not mean those "
                        f"in between: write the file in their order"
                    )
            try:
                # Labels select positions.
                chosen = select if index is None else index.slice_indexer(select.start, select.stop, select.step)
                positions = positions[chosen]
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{self.path}: {select} cannot be selected: {one_line(error)}; {described}") from None
        if not positions.size:
            raise DataError(f"{self.path}: there are no samples for select={select}: {described}")
        return positions

    def _look_at_storage(self, variables: dict[str, Variable]) -> None:
        """Check that all samples are written, and find out how many are compressed together."""
        begin = int(self._positions.min())
        end = int(self._positions.max()) + 1
        self.chunk = 1
        # Where nothing is compressed, a cache would have HDF5 read whole chunks.
        self._cache_bytes = 0
        for name, variable in variables.items():
            array = variable.array
            # Along netCDF's unlimited dimension, some variables may be written further than others.
            written = array.shape[0]
            if written < end:
                raise DataError(f"{self.path}: {name} is written for {written:,} of {end:,} samples")
            self._look_for_missing(name, array, begin, end)
            # HDF5 can read a part of a chunk that no filter, such as gzip, has changed. Zarr cannot.
            if array.chunks and (self._engine == "zarr" or array.id.get_create_plist().get_nfilters()):
                self.chunk = max(self.chunk, array.chunks[0])
                # HDF5 decompresses a chunk that is larger than its cache anew for every slice.
                chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
                self._cache_bytes = max(self._cache_bytes, CHUNK_CACHE, chunk_bytes)

    def _look_for_missing(
        self,
        name: str,
        array: Any,
        begin: int,
        end: int,
    ) -> None:
        """Refuse an array of which selected samples are not stored. Zarr cannot know: there it is a note."""
        fill = array.fill_value if self._engine == "zarr" else array.fillvalue
        if fill is not None:
            values, missing = self._meanings[name].unpack(np.array([fill], array.dtype))
            # What is not stored is read as missing, and found when a sample is read.
            if missing.any() or np.isnan(values).any():
                return
        if self._engine == "zarr":
            reason = missing_in_zarr(array)
            if reason:
                say_once(
                    f"{self.path}: {name}: {reason}. Zarr leaves out chunks with no other value, so this may be right; "
                    f"or a part was lost"
                )
            return
        reason = missing_in_hdf5(array, begin, end)
        if reason:
            raise DataError(
                f"{self.path}: {name} is not complete: {reason}; it would be read as {fill}: write all of it, or "
                f"select other samples"
            )

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
        slices = self.parts.get(name, ())
        # (batch, …)
        shape = (len(positions), *self.shapes[self.variables.index(name)])
        raw = np.empty(shape, array.dtype)
        # Read in the order of the file, whatever the order of the batch.
        order = positions.argsort(kind="stable")
        try:
            for begin, end in _spans(positions[order], self.chunk):
                # Of the samples of one slice, their places in the batch.
                places = order[begin:end]
                first = positions[places[0]]
                last = positions[places[-1]]
                # Named first: Python 3.10 takes no star inside of brackets.
                index = (slice(first, last + 1), *slices)
                values = array[index]
                # More than one: in the order of the batch, without those in between.
                if len(values) > 1:
                    offsets = positions[places] - first
                    values = values[offsets]
                raw[places] = values
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            reason = one_line(error)
            raise DataError(f"{self.path}: {name} cannot be read ({reason}): is the file damaged?") from None
        unpacked, missing = self._meanings[name].unpack(raw)
        # PyTorch takes only the byte order of the machine.
        dtype = unpacked.dtype.newbyteorder("=")
        if dtype == np.uint64:
            # They would become negative.
            too_large = (unpacked > INT64_MAX) & ~missing
            if too_large.any():
                raise DataError(
                    f"{self.path}: {name} has integers such as {unpacked[too_large][0]}, and those of PyTorch end at "
                    f"2^63 - 1: write them as floats, or leave the variable out"
                )
        if dtype.kind in "iu":
            dtype = np.dtype(np.int64)
        values = torch.from_numpy(unpacked.astype(dtype, copy=False))
        if values.is_floating_point() and self.dtype is not None:
            values = values.to(self.dtype)
        # Quick: a sum has NaN or inf if one of its terms has. A sum that overflows is looked at closely, too.
        if missing.any() or not values.sum().isfinite():
            values = self._without_missing(name, values, torch.from_numpy(missing), raw, chosen)
        return values

    def _without_missing(
        self,
        name: str,
        values: Tensor,
        missing: Tensor,
        raw: np.ndarray,
        chosen: np.ndarray,
    ) -> Tensor:
        """Put ``missing`` in the place of what is missing. Raises DataError: a sample is still not finite.

        Args:
            values, missing, raw: the values, which of them are missing, and how they are stored, (batch, …).
            chosen: indices of the samples, for messages, (batch,).
        """
        bad = missing | values.isnan()
        if self.missing is not None:
            has_fractions = values.is_floating_point() or values.is_complex()
            if not has_fractions and not float(self.missing).is_integer():
                raise DataError(f"{self.path}: {name} has integers, and missing={self.missing} is none: give one")
            values = values.masked_fill(bad, self.missing)
            bad = torch.zeros_like(bad)
        bad = bad | ~values.isfinite()
        if not bad.any():
            return values
        # The first value that is bad, and its sample.
        place = tuple(bad.nonzero()[0].tolist())
        row = bad[place[0]]
        raise DataError(
            f"{self.path}: sample {chosen[place[0]]} of {name} has {int(row.sum()):,} of {row.numel():,} values that "
            f"are missing or not finite, such as {values[place]} (stored as {raw[place]}): give missing=0.0 to replace "
            f"what is missing, choose a wider dtype where it is inf, or select other samples"
        )

    def _array(self, name: str) -> Any:
        """A variable in the file: an array of h5py or zarr."""
        opened = self._opened
        process = os.getpid()
        # A forked worker cannot share an open HDF5 file with its parent.
        if opened is None or opened[0] != process:
            # Arrays stay open, since HDF5 forgets the decompressed chunks of one that is closed.
            variables = self._read_variables()
            arrays = {name: variable.array for name, variable in variables.items()}
            opened = (process, arrays)
            # Two threads may both open the file. Each uses its own, and the later one stays.
            self._opened = opened
        return opened[1][name]

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
        arrays: the data set: `Arrays`, or `mmm.data.sequences.Sequences` of them.
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
        arrays: Any,
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
        # Refuses a global batch that does not fit, before the ranks meet.
        local_batches(*self.order)
        self.steps_per_epoch = len(arrays) // global_batch_size
        if block == 1 < arrays.chunk:
            say_once(
                f"{arrays.path}: samples are compressed in chunks of {arrays.chunk}, and to read one is to read its "
                f"chunk: block={arrays.chunk} reads each chunk once, and shuffles less (docs/tutorials/hdf5.md)"
            )

    def shared_facts(self) -> dict[str, str]:
        """What has to be the same on every rank. ``run.steps`` compares it."""
        samples, global_batch_size, _, _, seed, block = self.order
        digest = self.arrays.digest()[:12]
        return {
            "data": f"{self.arrays.path.name} with {samples:,} samples (hash {digest})",
            "order of samples": f"global batches of {global_batch_size}, seed {seed}, blocks of {block}",
        }

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


def indices_of(index: Any, path: Path, samples: int) -> np.ndarray:
    """Indices of samples as integers: of shape () for one sample, (batch,) for several.

    Args:
        path: the file, for messages.
        samples: number of samples in the data set.
    """
    if isinstance(index, slice):
        index = range(samples)[index]
    chosen = np.asarray(index)
    if chosen.dtype == bool and chosen.shape == (samples,):
        chosen = np.flatnonzero(chosen)
    # An empty list has no type.
    if chosen.ndim > 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise DataError(
            f"{path}: an index of samples is an integer, a list of integers, a slice, or a mask of {samples:,} "
            f"booleans, and not {chosen.dtype} of shape {chosen.shape}"
        )
    return chosen.astype(np.int64)


def _named(variables: dict[str, Variable]) -> Variable:
    """One that names its first dimension: it speaks for those that name none."""
    return max(variables.values(), key=lambda variable: bool(variable.dim))


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
