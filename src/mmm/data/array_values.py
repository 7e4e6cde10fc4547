"""What the stored values of a variable mean: packed, missing, out of range (the CF and netCDF conventions)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.array_file import LIBRARY_ERRORS, Variable, one_line
from mmm.errors import DataError

# Attributes that say how values are packed, which xarray unpacks.
PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
# NumPy's letters for numbers of more than 64 bits, which PyTorch has not.
WIDE = "gG"
LIMITS = ("valid_range", "valid_min", "valid_max")


@dataclass(frozen=True)
class Meaning:
    """What the stored values of a variable mean.

    Attributes:
        packing: attributes by which xarray unpacks.
        fill: netCDF's default fill value, if the variable has no other and it counts. None: it does not.
        low, high: the valid range, both ends included. None: there is no limit.
        unpacked_limits: whether the range is one of unpacked values.
    """

    packing: dict[str, Any]
    fill: Any
    low: Any
    high: Any
    unpacked_limits: bool

    def unpack(self, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values that are meant by those that are stored.

        Returns:
            The values, and which of them are missing: of shape (1, …) where none can be. A missing float is NaN.
        """
        values = raw
        if self.packing:
            values = _by_xarray(raw, self.packing)
        missing = np.zeros((1,) * raw.ndim, bool)
        if self.fill is not None:
            missing = raw == self.fill
        limited = values if self.unpacked_limits else raw
        if self.low is not None:
            missing = missing | (limited < self.low)
        if self.high is not None:
            missing = missing | (limited > self.high)
        if values.dtype.kind in "fc" and missing.any():
            values = np.where(missing, np.array(np.nan, values.dtype), values)
        return values, missing


def meaning_of(path: Path, name: str, variable: Variable) -> Meaning:
    """What the stored values of a variable mean.

    Raises:
        DataError: its attributes cannot be used.
    """
    stored = variable.array.dtype
    attributes = {key: value for key, value in variable.attributes.items() if key in PACKING + LIMITS}
    try:
        meaning = _meaning(variable, dict(attributes))
        values, _ = meaning.unpack(np.zeros(1, stored))
        if values.dtype.char in WIDE:
            raise ValueError(f"PyTorch has no {values.dtype}")
    except LIBRARY_ERRORS as error:
        raise DataError(
            f"{path}: {name} is {stored} with the attributes {attributes}, which becomes no tensor "
            f"({one_line(error)}): write it anew"
        ) from None
    return meaning


def _meaning(variable: Variable, attributes: dict[str, Any]) -> Meaning:
    array = variable.array
    is_integer = array.dtype.kind in "iub"
    packing = {key: attributes.pop(key) for key in PACKING if key in attributes}
    scaled = [packing[key] for key in ("scale_factor", "add_offset") if key in packing]
    if not np.isfinite(scaled).all():
        raise ValueError("a factor or an offset is not finite")
    fill = None
    if "_FillValue" not in packing:
        fill = _default_fill(array)
    elif len(packing) == 1:
        # xarray writes NaN as the fill value of all floats. NaN stays NaN: there is nothing to unpack.
        is_nan = np.isnan(packing["_FillValue"])
        # Zarr 2 reads 0 where no chunk is stored, which xarray takes for the fill value also of integers.
        is_of_zarr = is_integer and "_FillValue" not in array.attrs and packing["_FillValue"] == 0
        if is_nan or is_of_zarr:
            packing = {}
    # What is left are limits.
    if attributes and "_Unsigned" in packing:
        raise ValueError("a valid range of integers that are _Unsigned is not supported")
    low, high = attributes.get("valid_range", (None, None))
    low = attributes.get("valid_min", low)
    high = attributes.get("valid_max", high)
    of_floats = any(np.asarray(limit).dtype.kind == "f" for limit in attributes.values())
    return Meaning(packing, fill, low, high, bool(scaled) and is_integer and of_floats)


def _by_xarray(raw: np.ndarray, packing: dict[str, Any]) -> np.ndarray:
    import xarray

    packed = xarray.DataArray(raw, attrs=packing).to_dataset(name="values")
    with warnings.catch_warnings():
        # Several missing values: all of them become NaN, which is what is wanted.
        warnings.filterwarnings("ignore", ".*multiple fill values", xarray.SerializationWarning)
        values: np.ndarray = xarray.decode_cf(packed, decode_times=False)["values"].to_numpy()
    return values


def _default_fill(array: Any) -> Any:
    """The value that a netCDF library takes as missing where no attribute names one. None: there is none."""
    file = getattr(array, "file", None)
    # In Zarr all numbers are data.
    if file is None:
        return None
    from h5netcdf.legacyapi import default_fillvals

    fill = default_fillvals.get(array.dtype.str[1:])
    # In plain HDF5 all numbers are data, and of bytes all values may be: only those count that the library fills.
    # Libraries before 2016 write no _NCProperties, but do fill.
    is_filled = array.fillvalue == fill
    if not is_filled and ("_NCProperties" not in file.attrs or array.dtype.itemsize == 1):
        return None
    return fill
