"""What the stored values of a variable mean: packed, missing, out of range (the CF and netCDF conventions)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.array_file import NO_COORDINATE, Variable
from mmm.errors import DataError

# Attributes that say how values are packed, which xarray unpacks; and the number of values of each.
PACKING = {"scale_factor": 1, "add_offset": 1, "_FillValue": None, "missing_value": None}
LIMITS = {"valid_range": 2, "valid_min": 1, "valid_max": 1}
# What a netCDF library writes where a program wrote nothing, by type (NC_FILL_… of netcdf.h).
DEFAULT_FILL = {
    "i1": -127,
    "u1": 255,
    "i2": -32767,
    "u2": 65535,
    "i4": -2147483647,
    "u4": 4294967295,
    "i8": -9223372036854775806,
    "u8": 18446744073709551614,
    "f4": 9.969209968386869e36,
    "f8": 9.969209968386869e36,
}


@dataclass(frozen=True)
class Meaning:
    """What the stored values of a variable mean.

    Attributes:
        packing: attributes by which xarray unpacks.
        fill: netCDF's default fill value, if the variable has no other and it counts. None: it does not.
        low, high: the valid range, both ends included. None: there is no end.
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
            missing = missing | (raw == self.fill)
        limited = values if self.unpacked_limits else _as_unsigned(raw, self.packing)
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
        DataError: an attribute that says so is no number.
    """
    attributes = variable.attributes
    stored = variable.array.dtype
    packing: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for key, count in (PACKING | LIMITS).items():
        if key in attributes:
            numbers = _numbers(path, name, key, attributes[key], count)
            of_key = packing if key in PACKING else limits
            of_key[key] = numbers
    for key in ("scale_factor", "add_offset"):
        if key in packing and not np.isfinite(packing[key]):
            raise DataError(f"{path}: the attribute {key} of {name} is {packing[key]}, which unpacks no value")
    has_fill = "_FillValue" in packing
    scaled = "scale_factor" in packing or "add_offset" in packing
    if has_fill and not scaled and _is_default_of_zarr(variable):
        del packing["_FillValue"]
    # xarray writes NaN as the fill value of all floats. NaN stays NaN: there is nothing to unpack.
    if list(packing) == ["_FillValue"] and np.isnan(packing["_FillValue"]).all():
        packing = {}
    if "_Unsigned" in attributes and stored.kind in "iu":
        packing["_Unsigned"] = attributes["_Unsigned"]
    low, high = limits.get("valid_range", (None, None))
    low = limits.get("valid_min", low)
    high = limits.get("valid_max", high)
    of_floats = any(np.asarray(limit).dtype.kind == "f" for limit in limits.values())
    unpacked_limits = scaled and stored.kind in "iu" and of_floats
    if not unpacked_limits:
        low = _limit(low, packing, stored)
        high = _limit(high, packing, stored)
    fill = None if has_fill else _default_fill(variable.array)
    return Meaning(packing, fill, low, high, unpacked_limits)


def _numbers(
    path: Path,
    name: str,
    key: str,
    value: Any,
    count: int | None,
) -> Any:
    """The numbers of an attribute: one, or an array of several."""
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "iufb" or numbers.size not in (count or numbers.size,) or not numbers.size:
        expected = "numbers" if count is None else f"{count} of them"
        raise DataError(
            f"{path}: the attribute {key} of {name} is {value!r} ({numbers.dtype}), where numbers have to be, "
            f"{expected}: write the attribute anew"
        )
    return numbers.reshape(-1)[0] if numbers.size == 1 else numbers


def _by_xarray(raw: np.ndarray, packing: dict[str, Any]) -> np.ndarray:
    import xarray

    # xarray wants names, whatever they are.
    dims = [f"dim_{i}" for i in range(raw.ndim)]
    packed = xarray.Dataset({"values": (dims, raw, packing)})
    with warnings.catch_warnings():
        # Several missing values: all of them become NaN, which is what is wanted.
        warnings.filterwarnings("ignore", ".*multiple fill values", xarray.SerializationWarning)
        unpacked = xarray.decode_cf(packed, decode_times=False)["values"]
    values: np.ndarray = unpacked.to_numpy()
    return values


def _is_unsigned(packing: dict[str, Any], stored: np.dtype) -> bool:
    return stored.kind == "i" and str(packing.get("_Unsigned")).lower() == "true"


def _as_unsigned(raw: np.ndarray, packing: dict[str, Any]) -> np.ndarray:
    """Stored integers, as unsigned ones if the variable says that they are (``_Unsigned``)."""
    if _is_unsigned(packing, raw.dtype):
        return raw.view(raw.dtype.str.replace("i", "u"))
    return raw


def _limit(limit: Any, packing: dict[str, Any], stored: np.dtype) -> Any:
    """An end of the valid range, in the type of what it is compared with."""
    if limit is not None and _is_unsigned(packing, stored):
        # -1 of 8 bits is 255.
        return int(limit) % (1 << 8 * stored.itemsize)
    return limit


def _is_default_of_zarr(variable: Variable) -> bool:
    """Whether xarray took 0 for the ``_FillValue`` of integers only because Zarr reads 0 where no chunk is stored."""
    array = variable.array
    return (
        "_FillValue" in variable.attributes
        and "_FillValue" not in array.attrs
        and array.dtype.kind in "iub"
        and variable.attributes["_FillValue"] == 0
    )


def _default_fill(array: Any) -> Any:
    """The value that a netCDF library takes as missing where no attribute names one. None: there is none."""
    kind = array.dtype.str[1:]
    if kind not in DEFAULT_FILL or not _is_netcdf(array):
        return None
    fill = np.array(DEFAULT_FILL[kind]).astype(array.dtype)
    # Of bytes all values may be data: only those count that the library fills.
    if array.dtype.itemsize == 1 and array.fillvalue != fill:
        return None
    return fill


def _is_netcdf(array: Any) -> bool:
    """Whether a netCDF library has written an array. In plain HDF5 all numbers are data."""
    import h5py

    if not isinstance(array, h5py.Dataset):
        return False
    if "_NCProperties" in array.file.attrs:
        return True
    # Libraries before 2016 do not leave their name, but mark dimensions.
    if "_Netcdf4Dimid" in array.attrs:
        return True
    for dim in array.dims:
        for scale in dim.values():
            if "_Netcdf4Dimid" in scale.attrs or scale.attrs.get("NAME", b"").startswith(NO_COORDINATE):
                return True
    return False
