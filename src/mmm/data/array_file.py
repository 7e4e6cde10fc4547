"""What an array file says of itself, and what its values mean: HDF5, netCDF-4 or Zarr.

`mmm.data.arrays` reads the samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.text.formats import reading
from mmm.errors import DataError
from mmm.outside import open_file, printable

# One of these is in the folder of every Zarr group: of version 3, and of version 2.
ZARR = ("zarr.json", ".zgroup")
NETCDF_3 = b"CDF"
# Attributes that say how a variable's values are packed (the CF conventions).
PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")


def engine_of(path: Path) -> str:
    """The engine of xarray for a file: ``"h5netcdf"`` or ``"zarr"``.

    Raises:
        DataError: the file is empty, of another format, or cannot be read.
    """
    if path.is_dir():
        if not any((path / name).exists() for name in ZARR):
            names = " or ".join(ZARR)
            raise DataError(f"{path} is a folder without {names}: give a file, or the folder of a Zarr group")
        try:
            import zarr  # noqa: F401
        except ImportError:
            raise DataError(
                f"{path} is a Zarr group, and the package zarr is missing: pip install 'mmm[zarr]'"
            ) from None
        return "zarr"
    import h5py

    with reading(path), open_file(path) as file:
        head = file.read(8)
    if not head:
        raise DataError(f"{path} is empty: it has 0 bytes")
    if head.startswith(NETCDF_3):
        raise DataError(f"{path} is netCDF-3: convert it by nccopy -k nc4 {path} NEW.nc")
    if not h5py.is_hdf5(path):
        raise DataError(f"{path} is none of HDF5, netCDF-4 and Zarr, by its first bytes: convert it to one of them")
    return "h5netcdf"


def describe(
    path: Path,
    engine: str,
    group: str,
) -> Any:
    """Open a file by xarray, which reads names, dimensions and coordinates.

    Raises:
        DataError: it cannot be opened, or has no such group.
    """
    import xarray

    options: dict[str, Any] = {}
    if engine == "h5netcdf":
        # Dimensions of files that name none.
        options["phony_dims"] = "sort"
    try:
        return xarray.open_dataset(
            path,
            engine=engine,
            group=group,
            decode_timedelta=False,
            cache=False,
            **options,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = one_line(error)
        raise DataError(
            f"{path}: the group {group} cannot be opened ({reason}): is there such a group, and is the file complete?"
        ) from None


def one_line(error: Exception) -> str:
    """The first line of a library's message."""
    lines = str(error).splitlines() or [type(error).__name__]
    return printable(lines[0])


def packing_of(variable: Any) -> dict[str, Any]:
    """How the values of a variable are packed: attribute → value.

    Args:
        variable: an xarray ``Variable`` of `describe`.
    """
    packing = {}
    for key, value in variable.encoding.items():
        if key in PACKING:
            packing[key] = value
    # xarray writes NaN as the fill value of all floats. NaN stays NaN: there is nothing to unpack.
    if list(packing) == ["_FillValue"] and np.isnan(packing["_FillValue"]):
        packing = {}
    return packing


def unpack(
    name: str,
    raw: np.ndarray,
    packing: dict[str, Any],
) -> np.ndarray:
    """The values that are meant by those that are stored. Missing ones are NaN."""
    if not packing:
        return raw
    import xarray

    # xarray wants names, whatever they are.
    dims = [f"dim_{i}" for i in range(raw.ndim)]
    packed = xarray.Dataset({name: (dims, raw, packing)})
    unpacked = xarray.decode_cf(packed, decode_times=False)
    values: np.ndarray = unpacked[name].to_numpy()
    return values
