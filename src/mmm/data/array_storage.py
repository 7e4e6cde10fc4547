"""Looks for values that an array promises and that are not stored. A library reads something else in their place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mmm.data.array_file import LIBRARY_ERRORS, one_line


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
    if array.external:
        return "it is stored in external files, which may be shorter"
    if array.chunks is None:
        is_empty = array.size and not array.id.get_storage_size()
        return "nothing is written" if is_empty else ""
    chunk = array.chunks[0]
    stored: list[int] = []
    if hasattr(array.id, "chunk_iter"):
        array.id.chunk_iter(lambda info: stored.append(info.chunk_offset[0]))
    else:
        # HDF5 before 1.12.3 has no such pass over all chunks.
        for index in range(array.id.get_num_chunks()):
            stored.append(array.id.get_chunk_info(index).chunk_offset[0])
    # Chunks of samples that are not selected do not matter.
    first = begin // chunk * chunk
    written = sum(first <= offset < end for offset in stored)
    needed = math.ceil((end - first) / chunk)
    for length, chunk_length in zip(array.shape[1:], array.chunks[1:], strict=True):
        needed *= math.ceil(length / chunk_length)
    if written < needed:
        return f"{written:,} of {needed:,} chunks are written"
    return ""


def _missing_source(
    array: Any,
    begin: int,
    end: int,
) -> str:
    """What the samples of a virtual array have no source for."""
    import h5py

    own = Path(array.file.filename)
    mapped = 0
    for source in array.virtual_sources():
        name = source.file_name
        try:
            lowest, highest = source.vspace.get_select_bounds()
        except (RuntimeError, ValueError):
            return f"its source {name} has no end, so nobody knows whether it is complete"
        points = source.vspace.get_select_npoints()
        mapped += points
        if highest[0] < begin or lowest[0] >= end:
            continue
        try:
            with h5py.File(own if name == "." else own.parent / name, "r") as file:
                stored = file[source.dset_name]
                reason = missing_in_hdf5(stored, 0, len(stored))
                # A source that is read as a whole has no bounds.
                last = (-1,)
                if source.src_space.get_select_type() != h5py.h5s.SEL_ALL:
                    last = source.src_space.get_select_bounds()[1]
                if stored.size < points or any(map(int.__le__, stored.shape, last)):
                    reason = f"it is of shape {stored.shape}, and {points:,} values are read"
        except LIBRARY_ERRORS as error:
            reason = one_line(error)
        if reason:
            return f"its source {name}, {source.dset_name}: {reason}"
    if mapped < array.size:
        return f"its sources have {mapped:,} of {array.size:,} values"
    return ""


def missing_in_zarr(array: Any) -> str:
    """How many chunks of a Zarr array are not stored, in words; "" if all are.

    Zarr need not store a chunk that has the fill value alone, so these may be right.
    """
    missing = array.nchunks - array.nchunks_initialized
    if missing > 0:
        return f"{missing:,} of {array.nchunks:,} chunks are not stored, and are read as {array.fill_value or 0}"
    return ""
