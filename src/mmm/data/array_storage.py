"""Looks for values that an array promises and that are not stored. A library reads something else in their place."""

from __future__ import annotations

import math
import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

# Metadata of a Zarr array stand next to its chunks. A chunk is called 0.0, c/0/0, 0/0 or c.
CHUNK_NAME = "c."


def missing_in_hdf5(
    array: Any,
    begin: int,
    end: int,
) -> str:
    """What of the samples `begin` to `end` of an HDF5 array is not stored, in words; "" if all is.

    What cannot be known: a part that nobody wrote of an array that is stored in one piece, or whose chunks were made
    when the array was (as parallel HDF5 makes them).
    """
    if array.is_virtual:
        return _missing_source(array, begin, end)
    for name, offset, size in array.external or ():
        stored = os.path.getsize(name) if os.path.exists(name) else -1
        # The last file may be without an end.
        if stored < offset + min(size, array.nbytes):
            return f"its external file {name} is missing or too short"
    if array.chunks is None:
        if array.size and array.id.get_storage_size() == 0:
            return "nothing is written"
        return ""
    chunks_along = [math.ceil(length / chunk) for length, chunk in zip(array.shape, array.chunks, strict=True)]
    total = math.prod(chunks_along)
    written = array.id.get_num_chunks()
    if written == total:
        return ""
    # Chunks of samples that are not selected do not matter.
    chunk = array.chunks[0]
    first_axis = range(begin // chunk, math.ceil(end / chunk))
    for place in product(first_axis, *map(range, chunks_along[1:])):
        corner = tuple(int(i * length) for i, length in zip(place, array.chunks, strict=True))
        if array.id.get_chunk_info_by_coord(corner).byte_offset is None:
            return f"only {written:,} of {total:,} chunks are written, and not that of sample {corner[0]:,}"
    return ""


def _missing_source(
    array: Any,
    begin: int,
    end: int,
) -> str:
    """What the samples of a virtual array have no source for."""
    import h5py

    mapped = 0
    for source in array.virtual_sources():
        try:
            lowest, highest = source.vspace.get_select_bounds()
        except (RuntimeError, ValueError):
            # Without an end: HDF5 makes the array as long as the sources that it finds. A name with %b stands for many.
            lowest = (0,)
            highest = (len(array) - 1,)
            mapped = array.size
        else:
            mapped += source.vspace.get_select_npoints()
        if highest[0] < begin or lowest[0] >= end or "%b" in source.file_name:
            continue
        path = _source_path(array, source.file_name)
        if path is None:
            return f"its source {source.file_name} is not there"
        try:
            with h5py.File(path, "r") as file:
                reason = _missing_in(file[source.dset_name], source)
        except (OSError, KeyError) as error:
            reason = str(error).strip("\"'")
        if reason:
            return f"its source {source.file_name}, {source.dset_name}: {reason}"
    if mapped < array.size:
        return f"its sources have {mapped:,} of {array.size:,} values"
    return ""


def _missing_in(array: Any, source: Any) -> str:
    """What of the array that a virtual one shows is not stored."""
    try:
        lowest, highest = source.src_space.get_select_bounds()
    except (RuntimeError, ValueError):
        # All of it, or without an end.
        lowest = (0,) * array.ndim
        highest = tuple(length - 1 for length in array.shape)
        needed = _points(source.vspace)
        if array.size < needed:
            return f"it has {array.size:,} values, and {needed:,} are read"
    ends = [place + 1 for place in highest]
    if any(length < needed for length, needed in zip(array.shape, ends, strict=True)):
        return f"it is of shape {array.shape}, and {tuple(ends)} is read"
    return missing_in_hdf5(array, lowest[0], ends[0])


def _points(space: Any) -> int:
    """Number of values of a selection; 0 for one without an end."""
    try:
        return int(space.get_select_npoints())
    except (RuntimeError, ValueError):
        return 0


def _source_path(array: Any, name: str) -> Path | None:
    """The file that HDF5 reads for a name in a virtual array; None if there is none."""
    if name == ".":
        return Path(array.file.filename)
    folder = Path(array.file.filename).parent
    prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", str(folder))
    candidates = [folder / name, Path(name), folder / Path(name).name]
    if prefix:
        candidates.insert(0, Path(prefix) / name)
    return next((path for path in candidates if path.is_file()), None)


def missing_in_zarr(array: Any, folder: Path) -> str:
    """How many chunks of a Zarr array are not stored, in words; "" if all are.

    Zarr need not store a chunk that has the fill value alone, so these may be right.
    """
    chunks = getattr(array, "shards", None) or array.chunks
    total = math.prod(math.ceil(length / chunk) for length, chunk in zip(array.shape, chunks, strict=True))
    stored = 0
    for _, _, names in os.walk(folder):
        stored += sum(_is_chunk(name) for name in names)
    if stored >= total:
        return ""
    fill = np.zeros((), array.dtype) if array.fill_value is None else array.fill_value
    return f"{total - stored:,} of {total:,} chunks are not stored, and are read as {fill}"


def _is_chunk(name: str) -> bool:
    rest = name.lstrip(CHUNK_NAME).replace(".", "")
    return name == "c" or rest.isdigit()
