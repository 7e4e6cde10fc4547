"""The weights of this package's own checkpoints: read in slices, and written from others', a few rows at a time."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mmm.checkpoint.manifest import MANIFEST, PARTIAL, FileSum, Manifest, broken_file, discard, read_manifest
from mmm.checkpoint.model_metadata import TOKENIZERS, ChatFormat, ModelMetadata, read_tokenizer
from mmm.checkpoint.state import MODEL
from mmm.checkpoint.state import shapes_of as shapes_in
from mmm.checkpoint.storage import Writer, one_line, read_metadata
from mmm.checkpoint.tensors import TensorEntry
from mmm.errors import CheckpointError
from mmm.models.definition import ModelDef, of_fields
from mmm.models.keys import tokens_of
from mmm.outside import open_file, short
from mmm.torch_private.checkpoint import storage_info
from mmm.weights.weights import Weights, shapes_of

TRAINED, IMPORTED = "lm", "import"  # programs whose checkpoints have a language model
CORE = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")  # sizes that every checkpoint has


class OwnWeights(Weights):
    """A checkpoint's weights; its optimizer's state is not read.

    Raises:
        CheckpointError: it is damaged, or of another kind of model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        identity = self.manifest.identity
        program = identity.get("program")
        if program not in (TRAINED, IMPORTED):
            raise CheckpointError(f"{path} is of the program {short(program)}, whose model is no language model of lm")
        self.definition = of_fields(identity)
        # What an earlier mmm did not know is as it is by default.
        known = {field.name: None if field.name in CORE else field.default for field in fields(self.definition.config)}
        self.sizes = {name: identity.get(name, default) for name, default in known.items()}
        scaling = self.sizes.get("rope_scaling")
        if isinstance(scaling, dict) and scaling.get("rope_type") == "linear":
            self.sizes["rope_scaling"] = {name: scaling[name] for name in ("rope_type", "factor") if name in scaling}
        problem = broken_file(path, self.manifest.files, sums=False)
        if problem:
            raise CheckpointError(problem)
        metadata = read_metadata(path, self.manifest.files)
        self._places: dict[str, list[tuple[ChunkStorageMetadata, Any]]] = {}
        self.entries = {}
        # Of the tensor that was read last: a saved shard is read from the disk as one, and rows of it come in turn.
        self._cached: tuple[str, dict[tuple[int, ...], Tensor]] = ("", {})
        fqns = {where[1]: fqn for fqn, where in (metadata.planner_data or {}).items() if where[0] == MODEL}
        infos = cast(dict, metadata.storage_data)
        stored = {(index.fqn, tuple(index.offset or ())): info for index, info in infos.items()}
        for (kind, *names), entry in shapes_in(metadata).items():
            if kind == MODEL:
                name = names[0]
                self.entries[name] = TensorEntry(tuple(entry.size), entry.properties.dtype)
                self._places[name] = [(chunk, stored[fqns[name], tuple(chunk.offsets)]) for chunk in entry.chunks]
        _check_sizes(self.definition, self.sizes, self.entries, path)
        self.metadata = _metadata(path, self.manifest)

    def check(self, part: int = 0, parts: int = 1) -> str | None:
        files = self.manifest.files
        return broken_file(self.path, {name: files[name] for name in sorted(files)[part::parts]})

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        result = torch.empty(tuple(length), dtype=self.entries[name].dtype)
        if name != self._cached[0]:
            self._cached = (name, {})
        chunks = self._cached[1]
        for chunk, place in self._places[name]:
            # Where the chunk and the slice overlap: elements of the chunk, and of the result.
            source = []
            target = []
            for first, size, offset, extent in zip(start, length, chunk.offsets, chunk.sizes, strict=True):
                low = max(first, offset)
                high = max(min(first + size, offset + extent), low)
                source.append(slice(low - offset, high - offset))
                target.append(slice(low - first, high - first))
            if any(part.start == part.stop for part in source):
                continue
            key = tuple(chunk.offsets)
            if key not in chunks:
                chunks[key] = self._chunk(place, tuple(chunk.sizes), result.dtype)
            result[tuple(target)] = chunks[key][tuple(source)]
        return result

    def _chunk(self, place: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        path = self.path / place.relative_path
        try:
            with open_file(path) as file:
                file.seek(place.offset)
                content = io.BytesIO(file.read(place.length))
            tensor = torch.load(content, map_location="cpu", weights_only=True)
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError("it holds another tensor than the metadata say")
            return tensor
        except Exception as error:  # what is no tensor raises anything
            raise CheckpointError(f"{path} is not read: {one_line(error)}") from None


def _check_sizes(
    definition: ModelDef, sizes: Mapping[str, Any], entries: Mapping[str, TensorEntry], where: Path
) -> None:
    """Raises CheckpointError where sizes are not those of the tensors."""
    if sizes.get("n_experts"):
        return
    layers = sizes["n_layers"]
    if not isinstance(layers, int) or layers > len(entries):
        raise CheckpointError(f"{where}: {len(entries)} tensors are too few for {short(layers)} layers")
    try:
        shapes = shapes_of(definition, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    more = sorted(entries.keys() - shapes.keys())
    if more:
        raise CheckpointError(f"{where} has the tensor {short(more[0])}, which a model of these sizes has not")
    for name, shape in shapes.items():
        if name not in entries or entries[name].shape != shape:
            there = entries[name].shape if name in entries else "not there"
            raise CheckpointError(f"{where}: {name} is {there}, and the sizes of the model make it {shape}")


def _metadata(path: Path, manifest: Manifest) -> ModelMetadata:
    """What `ModelMetadata.describe` has written. Raises CheckpointError: it is something else."""
    about = manifest.about
    name = about.get("tokenizer")
    chat = about.get("chat")
    if name not in (None, "") and (name not in TOKENIZERS or name not in manifest.files):
        raise CheckpointError(f"{path} has the tokenizer {short(name)}, which is none of {', '.join(TOKENIZERS)}")
    tokenizer = None if name is None else (name, read_tokenizer(path / name) if name else b"")
    first, last = (tokens_of(about, key, path / MANIFEST) for key in ("bos", "eos"))
    try:
        form = None if chat is None else ChatFormat(**chat)
    except TypeError:
        raise CheckpointError(f"{path}: its chat template is {short(chat)}, which is none") from None
    return ModelMetadata(about.get("block"), last, tokenizer, bos=first, chat=form)


class _Slabs(DefaultSavePlanner):
    """Plans to save weights that are elsewhere, and reads each slab of rows when it is its turn to be written."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights

    def create_local_plan(self) -> SavePlan:
        items = []
        names = {}
        for name, entry in self.weights.entries.items():
            fqn = f"{MODEL}.{name}"
            names[fqn] = (MODEL, name)
            for start, length in entry.slabs():
                chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(length))
                about = TensorWriteData(chunk, TensorProperties(dtype=entry.dtype), torch.Size(entry.shape))
                items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items, planner_data=names)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        name = write_item.index.fqn.removeprefix(f"{MODEL}.")
        return self.weights.read(name, tuple(chunk.offsets), tuple(chunk.sizes))


class _SlabWriter(Writer):
    """Writes one slab after the other. PyTorch's own way keeps all tensors of a file until it is closed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        name = "__0_0.distcp"
        results = []
        with self._files.create_stream(self._folder / name, "wb") as stream:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                first = stream.tell()
                assert isinstance(tensor, Tensor)
                # torch.save writes a tensor's whole storage.
                torch.save(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone(), stream)
                size = stream.tell() - first
                results.append(WriteResult(item.index, size, storage_info(name, first, size)))
            stream.flush()
            os.fsync(stream.fileno())
        future: Future = Future()
        future.set_result((results, self._files.sums))
        return future


def write_own(weights: Weights, folder: Path) -> None:
    """Write weights as a checkpoint of this package, of step 0 and without an optimizer's state, a slab of rows at a
    time. The folder has its name once it is complete.

    Raises:
        CheckpointError: the folder is there, or it cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there already: give another folder, or remove it")
    metadata = weights.metadata
    partial = folder.with_name(folder.name + PARTIAL)
    about = {"from": str(weights.path), **metadata.describe()}
    manifest = Manifest(0, {"program": IMPORTED, **weights.sizes}, {}, about, {})

    def finished(files: dict[str, FileSum]) -> None:
        replace(manifest, files=files | metadata.write_tokenizer(partial)).write(partial)
        os.rename(partial, folder)

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            dcp.save({}, storage_writer=_SlabWriter(partial, finished), planner=_Slabs(weights), no_dist=True)
    except (CheckpointException, OSError) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        discard(partial)
        text = str(first) if isinstance(first, CheckpointError) else f"{folder} is not written: {one_line(first)}"
        raise CheckpointError(text) from None
