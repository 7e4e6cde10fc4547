"""What an array file says of itself: its variables, their dimensions and coordinates. HDF5, netCDF-4 or Zarr.

`mmm.data.arrays` reads the samples, `mmm.data.array_values` knows what the stored values mean, and
`mmm.data.array_storage` looks for values that are not stored.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mmm.data.text.formats import reading
from mmm.errors import DataError
from mmm.outside import open_file, printable

# One of these is in the folder of every Zarr group: of version 3, and of version 2.
ZARR = ("zarr.json", ".zgroup")
NETCDF_3 = b"CDF"
# The NAME of a dimension scale that stands for a netCDF dimension without coordinate begins with this.
NO_COORDINATE = b"This is a netCDF dimension but not a netCDF variable"
# What a library raises for a file that it cannot read, or a value that it cannot decode.
LIBRARY_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    ImportError,
)


@dataclass(frozen=True)
class Variable:
    """What a file says of a variable.

    Attributes:
        array: the array of h5py or zarr.
        dim: name of the first dimension, with its group in HDF5; "" if the file names none.
        length: length of this dimension.
        attributes: attributes of the variable.
        coordinate: the stored labels along this dimension: a data set of h5py, or a variable of xarray. None: there are
            no labels.
    """

    array: Any
    dim: str
    length: int
    attributes: dict[str, Any]
    coordinate: Any


def engine_of(path: Path) -> str:
    """The package that reads a file: ``"h5py"`` or ``"zarr"``.

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
    if head.startswith(NETCDF_3):
        raise DataError(f"{path} is netCDF-3: convert it by nccopy -k nc4 {path} NEW.nc")
    if not h5py.is_hdf5(path):
        raise DataError(
            f"{path} is none of HDF5, netCDF-4 and Zarr, by its first bytes ({head!r}): convert it to one of them"
        )
    return "h5py"


def open_group(
    path: Path,
    group: str,
    cache_bytes: int,
) -> Any:
    """A group of an HDF5 file.

    Args:
        cache_bytes: bytes of decompressed chunks that HDF5 keeps for each array.

    Raises:
        DataError: the file cannot be opened, or has no such group.
    """
    import h5py

    try:
        file = h5py.File(path, "r", rdcc_nbytes=cache_bytes)
    except OSError as error:
        reason = one_line(error)
        hint = "is the file complete?"
        if "lock file" in reason:
            hint = (
                "it is locked: a program that has it open for writing has to close it first; if there is none, and the "
                "file system has no locks: export HDF5_USE_FILE_LOCKING=FALSE"
            )
        raise DataError(f"{path} cannot be opened ({reason}): {hint}") from None
    opened = None
    # A link may lead to a file that is lost.
    with contextlib.suppress(KeyError):
        opened = file[group]
    if not isinstance(opened, h5py.Group):
        raise DataError(f"{path}: the group {group} cannot be opened: it is not there, or no group")
    return opened


def read_variable(
    path: Path,
    group: Any,
    name: str,
) -> Variable:
    """What an HDF5 file says of a variable.

    Args:
        group: the group of `open_group`.

    Raises:
        DataError: there is no such variable.
    """
    import h5py

    array = None
    # A link may lead to a file that is lost.
    with contextlib.suppress(KeyError):
        array = group[name]
    if not isinstance(array, h5py.Dataset) or array.shape is None:
        raise _no_variable(path, group.name, name, group)
    # The labels along the first dimension may stand in any group: HDF5 links to them.
    scale = None
    if h5py.h5ds.is_scale(array.id) and array.ndim == 1:
        scale = array
    elif array.ndim and len(array.dims[0]):
        scale = array.dims[0][0]
    length = len(array) if array.ndim else 0
    dim = ""
    coordinate = None
    if scale is not None:
        dim = scale.name
        length = _length_of(array, scale)
        if not scale.attrs.get("NAME", b"").startswith(NO_COORDINATE):
            coordinate = scale
    return Variable(array, dim, length, attributes_of(array), coordinate)


def _length_of(array: Any, scale: Any) -> int:
    """Length of the first dimension of an HDF5 array. An unlimited one of netCDF is as long as its longest variable."""
    lengths = [len(array)]
    if array.maxshape[0] is None:
        for reference, axis in scale.attrs.get("REFERENCE_LIST", ()):
            lengths.append(array.file[reference].shape[axis])
    return max(lengths)


def attributes_of(array: Any) -> dict[str, Any]:
    """The attributes of an array of h5py. Those that cannot be read are left out, such as references."""
    attributes = {}
    for key in array.attrs:
        try:
            value = array.attrs[key]
        except (OSError, TypeError):
            # A type that NumPy has not. None of the attributes that count has such a type.
            continue
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        # netCDF writes a number as an array of one.
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iufb":
            value = value.ravel()[0]
        attributes[key] = value
    return attributes


def read_zarr_variables(
    path: Path,
    group: str,
    names: tuple[str, ...],
) -> dict[str, Variable]:
    """What a Zarr folder says of variables, by name.

    Raises:
        DataError: the group cannot be opened, or has no such variable.
    """
    import zarr

    described = _describe(path, group)
    variables = {}
    for name in names:
        if name not in described.variables:
            raise _no_variable(path, group, name, described.variables)
        variable = described.variables[name]
        dim = ""
        coordinate = None
        length = 0
        if variable.ndim:
            dim = str(variable.dims[0])
            length = len(variable)
            coordinate = _zarr_coordinate(path, group, dim, length)
        # As its own metadata describe it: the consolidated ones may be older.
        array = zarr.open_array(str(path / group.strip("/") / name), mode="r")
        variables[name] = Variable(array, dim, length, dict(variable.attrs), coordinate)
    return variables


def _zarr_coordinate(
    path: Path,
    group: str,
    dim: str,
    length: int,
) -> Any:
    """The variable of this name in the group, or in the nearest group above that has one of this length; or None."""
    place = PurePosixPath("/", group)
    for folder in (place, *place.parents):
        inside = str(folder)
        # A group above that has no such name need not be readable.
        if not (path / inside.strip("/") / dim).is_dir():
            continue
        candidate = _describe(path, inside).variables.get(dim)
        if candidate is not None and candidate.shape == (length,):
            return candidate
    return None


def _describe(path: Path, group: str) -> Any:
    """A Zarr group as xarray describes it: names, dimensions and attributes. Nothing is decoded."""
    import xarray

    try:
        return xarray.open_dataset(
            path,
            engine="zarr",
            group=group,
            decode_cf=False,
            cache=False,
            consolidated=False,
        )
    except LIBRARY_ERRORS as error:
        raise DataError(
            f"{path}: the group {group} cannot be opened ({one_line(error)}): is there such a group, and complete?"
        ) from None


def _no_variable(path: Path, group: str, name: str, names: Any) -> DataError:
    listed = ", ".join(map(str, names)) or "none"
    if name in list(names):
        return DataError(f"{path}: {name} in the group {group} cannot be read: is its file complete?")
    return DataError(f"{path} has no variable {name!r} in the group {group}; its variables: {listed}")


def labels_of(path: Path, variable: Variable) -> Any:
    """The labels along the first dimension of a variable, decoded: an index of pandas. None: the file has none.

    Raises:
        DataError: they cannot be decoded.
    """
    stored = variable.coordinate
    if stored is None:
        return None
    import xarray

    name = variable.dim.rpartition("/")[2]
    if len(stored) < variable.length:
        raise DataError(f"{path}: {name} is written for {len(stored):,} of {variable.length:,} samples")
    if isinstance(stored, xarray.Variable):
        attributes = stored.attrs
        values = stored.to_numpy()
    else:
        attributes = attributes_of(stored)
        values = stored.asstr()[:] if stored.dtype.kind in "OS" else stored[:]
    # References of HDF5 are of no use to xarray.
    attributes = {key: value for key, value in attributes.items() if isinstance(value, str | int | float | np.generic)}
    try:
        packed = xarray.Dataset({name: ((name,), values, attributes)})
        return xarray.decode_cf(packed, decode_timedelta=False)[name].to_index()
    except LIBRARY_ERRORS as error:
        raise DataError(
            f"{path}: the labels of {name} cannot be decoded ({one_line(error)}; {attributes}): write them anew, or "
            f"install cftime if their calendar needs it: pip install 'mmm[calendars]'"
        ) from None


def one_line(error: Exception) -> str:
    """The first line of a library's message."""
    # A KeyError shows its message in quotes.
    lines = str(error).strip("\"'").splitlines() or [type(error).__name__]
    return printable(lines[0])
