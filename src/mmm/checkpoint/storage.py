"""DCP's files: written with a checksum each, and read without executing a pickle.

DCP keeps tensors in ``__<rank>_0.distcp``, which its reader loads with ``weights_only``. A pickle called ``.metadata``
says which part of which tensor is where. It is read here by an unpickler that knows DCP's own classes and no others.
DCP unpickles values that are not tensors without any limit, so a checkpoint that has one is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from mmm.checkpoint.manifest import FileSum, file_sum
from mmm.errors import CheckpointError
from mmm.outside import open_file
from mmm.torch_private.checkpoint import pickled_names

METADATA = ".metadata"
_CLASSES = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.StorageMeta,
)
# What .metadata may be made of, by module and name: classes that do nothing else when they are called.
KNOWN = {
    **{(metadata.__name__, kind.__name__): kind for kind in _CLASSES},
    ("torch", "Size"): torch.Size,
    **pickled_names(),
}


class _HashedFile(io.BufferedWriter):
    """A file to write, with the checksum of what was meant to be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            # Such as a full disk, which PyTorch's writer would report as "unexpected pos".
            self.error = error
            raise


class _HashedFiles(filesystem.FileSystem):
    """DCP's access to files. Every file is read back after it was written.

    Attributes:
        sums: size and checksum of the files written so far, by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:  # type: ignore[override]
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _HashedFile(Path(path)) as file:
            try:
                yield file
            except RuntimeError as error:
                raise file.error or error from None
        written = FileSum(file.size, file.digest.hexdigest())
        if file_sum(Path(path)) != written:
            raise CheckpointError(f"{path} was written, but reads back as something else: do not trust this disk")
        self.sums[Path(path).name] = written


class Writer(dcp.FileSystemWriter):
    """DCP's writer, which reads each file back and compares its checksum.

    Args:
        path: the folder to write, which is made here. What a failed save has left in it is removed.
        finished: called with all files on the first rank of the group, once all ranks have written.
        file_per_tensor: write a file for each tensor. PyTorch keeps all tensors of a file in memory until it is closed.
    """

    def __init__(
        self,
        path: Path,
        finished: Callable[[dict[str, FileSum]], None],
        file_per_tensor: bool = False,
    ) -> None:
        super().__init__(path, single_file_per_rank=not file_per_tensor)
        self._files = _HashedFiles()
        # The base class writes by `fs`.
        self.fs = self._files
        self._folder = path
        self._finished = finished

    def storage_meta(self) -> StorageMeta:
        # DCP would add the path, which is the temporary one.
        return StorageMeta(save_id=self.save_id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # DCP calls this on one rank, after all ranks have made the folder and before any has written. It sends an error
        # here to the other ranks.
        for leftover in self._folder.iterdir():
            leftover.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        results = []
        if plan.items:
            results = super().write_data(plan, planner).wait()
        # DCP gathers this on the first rank, for `finish`.
        future: Future = Future()
        future.set_result((results, self._files.sums))
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        files: dict[str, FileSum] = {}
        for _, sums in results:
            files |= sums
        super().finish(metadata, [written for written, _ in results])
        # DCP writes the metadata by this name and then renames the file.
        temporary = f"{METADATA}.tmp"
        files[METADATA] = self._files.sums[temporary]
        files.pop(temporary, None)
        self._finished(dict(sorted(files.items())))
        # DCP now broadcasts the metadata, which grow with ranks times tensors. No rank needs them: send none.
        metadata.state_dict_metadata = {}
        metadata.storage_data = None
        metadata.planner_data = None


class _Unpickler(pickle.Unpickler):
    """Unpickles ``.metadata``; refuses every class and function that is not in `KNOWN`."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong to DCP's metadata")
        return KNOWN[module, name]


def _check_memo(content: bytes) -> None:
    """Raise ValueError if a pickle puts an object at a huge index of its memo, which would be a list of gigabytes."""
    for opcode, argument, _ in pickletools.genops(content):
        if "PUT" in opcode.name and int(argument or 0) > len(content):
            raise ValueError(f"it puts an object at place {argument} of its memo, and has {len(content)} bytes")


def read_metadata(folder: Path, files: Mapping[str, FileSum]) -> Metadata:
    """Read DCP's metadata.

    Args:
        files: the checkpoint's files; every tensor must be in one of them.

    Raises:
        CheckpointError: the file holds anything but the metadata of tensors in `files`.
    """
    path = folder / METADATA
    try:
        with open_file(path) as file:
            content = file.read()
        _check_memo(content)
        loaded = _Unpickler(io.BytesIO(content)).load()
        if type(loaded) is not Metadata:
            raise TypeError("it is not DCP's metadata")
        paths = loaded.planner_data or {}
        for name, entry in loaded.state_dict_metadata.items():
            if type(entry) is not TensorStorageMetadata:
                raise TypeError(f"{name} is not a tensor")
            # Without planner_data there is nothing to check.
            if name not in paths:
                continue
            # ("model", name of a weight), which DCP joins with dots.
            if len(paths[name]) < 2:
                raise TypeError(f"{name} belongs to neither the model nor the optimizer")
            if ".".join(map(str, paths[name])) != name:
                raise ValueError(f"{name} is called {paths[name]}")
        _check_places(loaded, files)
    # A pickle that is not what it claims to be raises anything.
    except Exception as error:
        raise CheckpointError(f"{path} is not read: {one_line(error)}") from None
    return loaded


def _check_places(loaded: Metadata, files: Mapping[str, FileSum]) -> None:
    """Raise ValueError if a chunk is in a file that is not in `files`, or a tensor's chunks do not add up to it."""
    for place in cast(dict, loaded.storage_data).values():
        if place.relative_path not in files:
            raise ValueError(f"it names the file {place.relative_path}, which does not belong to the checkpoint")
    for name, entry in cast(dict[str, TensorStorageMetadata], loaded.state_dict_metadata).items():
        # In elements. A gap would be loaded as whatever was in memory.
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise ValueError(f"the chunks of {name} do not cover it")


class Reader(dcp.FileSystemReader):
    """DCP's reader, given the metadata from `read_metadata`; its errors name the file."""

    def __init__(self, folder: Path, loaded: Metadata) -> None:
        super().__init__(folder)
        self._metadata = loaded
        self._file_name = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        # Called for each tensor: the last name is that of the file at fault.
        self._file_name = sinfo.relative_path
        return super()._slice_file(file, sinfo)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except Exception as error:
            text = one_line(error)
            if isinstance(error, pickle.UnpicklingError):
                text = "it holds more than tensors"
            path = Path(self.path) / self._file_name
            raise CheckpointError(f"{path} is not read: {text}") from None


class _Into(DefaultLoadPlanner):
    """Has a part of a tensor read into one of its shape."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.target


def read_part(folder: Path, loaded: Metadata, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
    """Read a part of a tensor, from all the chunks that it was saved in.

    Args:
        loaded: the checkpoint's metadata, from `read_metadata`.
        name: DCP's name of the tensor, such as ``model.norm.weight``.
        start, length: first index and number of elements, per dim.

    Raises:
        CheckpointError: a file cannot be read.
    """
    entry = cast(TensorStorageMetadata, loaded.state_dict_metadata[name])
    target = torch.empty(tuple(length), dtype=entry.properties.dtype)
    wanted = ChunkStorageMetadata(torch.Size(start), torch.Size(length))
    items = create_read_items_for_chunk_list(name, entry, [wanted])
    reader = Reader(folder, loaded)
    reader.set_up_storage_reader(loaded, is_coordinator=True)
    reader.read_data(LoadPlan(items), _Into(target)).wait()
    return target


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it has none."""
    return str(error).partition("\n")[0] or type(error).__name__
