"""DCP's files: written with a checksum each, and read without executing a pickle.

DCP keeps tensors in ``__<rank>_0.distcp``, which its reader loads with ``weights_only``, and says in ``.metadata``, a
pickle, which part of which tensor is where. That one is read here by an unpickler that knows DCP's own classes and no
other. Values that are not tensors DCP unpickles without any limit: a checkpoint that has one is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.futures import Future

from mmm.checkpoint.manifest import FileSum, file_sum
from mmm.errors import CheckpointError
from mmm.outside import open_file
from mmm.torch_private.checkpoint import pickled_names

METADATA = ".metadata"
# What .metadata is made of: classes without side effects.
KNOWN = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
            *("BytesStorageMetadata", "StorageMeta"),
        )
    },
    ("torch", "Size"): torch.Size,
    **pickled_names(),
}


class _HashedFile(io.BufferedWriter):
    """A file to write, and the sum of what was meant to be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest, self.size = hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:  # such as a full disk, of which PyTorch's writer would say "unexpected pos"
            self.error = error
            raise


class _HashedFiles(filesystem.FileSystem):
    """DCP's access to files. What is written is read back; `sums` has the files by name."""

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
            raise CheckpointError(
                f"{path} was written, and reads back as something else: the disk is not to be trusted"
            )
        self.sums[Path(path).name] = written


class Writer(dcp.FileSystemWriter):
    """DCP's writer, whose files are read back by checksum.

    Args:
        path: a folder, made here; what a save that failed has left there is removed. finished: called on the first rank
            of the group, when all ranks have written, with all files.
    """

    def __init__(self, path: Path, finished: Callable[[dict[str, FileSum]], None]) -> None:
        super().__init__(path)
        self.fs = self._files = _HashedFiles()
        self._folder, self._finished = path, finished

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without DCP's path, which would be the temporary one

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # On one rank, which tells the others of an error, when all have made the folder and none has written.
        for left in self._folder.iterdir():
            left.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        results = super().write_data(plan, planner).wait() if plan.items else []
        future: Future = Future()
        future.set_result((results, self._files.sums))
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        files = {name: found for _, sums in results for name, found in sums.items()}
        super().finish(metadata, [written for written, _ in results])
        files[METADATA] = self._files.sums[f"{METADATA}.tmp"]  # the name that DCP writes it by
        self._finished({name: files[name] for name in sorted(files) if name != f"{METADATA}.tmp"})
        # DCP sends the metadata to all ranks, of which no one needs them: an entry a rank and tensor, for every rank.
        metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data = {}, None, None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of DCP's metadata")
        return KNOWN[module, name]


def _check_memo(content: bytes) -> None:
    """Raises ValueError where a pickle puts an object far out in its memo, which would be a list of gigabytes."""
    for opcode, argument, _ in pickletools.genops(content):
        if "PUT" in opcode.name and int(argument or 0) > len(content):
            raise ValueError(f"it puts an object at place {argument} of its memo, and has {len(content)} bytes")


def read_metadata(folder: Path, files: Mapping[str, FileSum]) -> Metadata:
    """DCP's metadata, of tensors in `files` alone. Raises CheckpointError: it is anything else."""
    path = folder / METADATA
    try:
        with open_file(path) as file:
            content = file.read()
        _check_memo(content)
        found = _Unpickler(io.BytesIO(content)).load()
        if type(found) is not Metadata:
            raise TypeError("it is not DCP's metadata")
        for name, entry in found.state_dict_metadata.items():
            if type(entry) is not TensorStorageMetadata:
                raise TypeError(f"{name} is not a tensor")
            if len((found.planner_data or {}).get(name, "at a path")) < 2:
                raise TypeError(f"{name} is neither the model's nor the optimizer's")
        _check_places(found, files)
    except Exception as error:  # a pickle that is not what it claims to be raises anything
        text = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} is not read: {text}") from None
    return found


def _check_places(found: Metadata, files: Mapping[str, FileSum]) -> None:
    """Raises ValueError where a chunk is in another file, or a tensor's chunks are not as large as it is."""
    for place in cast(dict, found.storage_data).values():
        if place.relative_path not in files:
            raise ValueError(f"it names the file {place.relative_path}, which is none of the checkpoint's")
    for name, entry in cast(dict[str, TensorStorageMetadata], found.state_dict_metadata).items():
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise ValueError(f"the chunks of {name} do not cover it")


class Reader(dcp.FileSystemReader):
    """DCP's reader, with metadata of `read_metadata`; an error names the file."""

    def __init__(self, folder: Path, found: Metadata) -> None:
        super().__init__(folder)
        self._found, self._file = found, ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._found.storage_meta = StorageMeta(load_id=self.load_id)
        return self._found

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        self._file = sinfo.relative_path
        return super()._slice_file(file, sinfo)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except Exception as error:
            text = "it holds more than tensors" if isinstance(error, pickle.UnpicklingError) else str(error)
            where = Path(self.path) / self._file
            raise CheckpointError(f"{where} is not read: {text.partition(chr(10))[0]}") from None
