"""The weights of this package's own checkpoints: read in slices, and written from others a few rows at a time."""

from __future__ import annotations

import io
import math
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
from mmm.checkpoint.model_metadata import TOKENIZERS, ChatFormat, ModelMetadata, read_descriptions, read_tokenizer
from mmm.checkpoint.state import MODEL, first_failure
from mmm.checkpoint.state import shapes_of as shapes_in
from mmm.checkpoint.storage import Writer, one_line, read_metadata
from mmm.checkpoint.tensors import TensorEntry
from mmm.errors import CheckpointError
from mmm.models.definition import ModelDef, of_fields
from mmm.models.keys import tokens_of
from mmm.nn.lora import A, B, LoRA, is_lora
from mmm.outside import open_file, short
from mmm.torch_private.checkpoint import storage_info
from mmm.weights.weights import Weights, shapes_of

# Programs whose checkpoints hold a language model.
TRAINED = "lm"
IMPORTED = "import"
# Sizes that every checkpoint has.
CORE = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")


# A chunk of a tensor, and where it is on disk: file, first byte and bytes, as DCP describes it.
_Chunk = tuple[ChunkStorageMetadata, Any]


class OwnWeights(Weights):
    """A checkpoint's weights. Its optimizer's state is not read.

    Of a run with ``--lora``, a matrix is read merged with the two small ones next to it: W + scale · B A.

    Attributes:
        small: shape and dtype of each A and B, by name; `read_small` reads them.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another kind of model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        identity = self.manifest.identity
        program = identity.get("program")
        if program not in (TRAINED, IMPORTED):
            raise CheckpointError(
                f"{path} is of the program {short(program)}, whose model is not a language model of lm"
            )
        self.definition = of_fields(identity)
        # A field that an earlier mmm did not know has its default.
        self.sizes = {}
        for field in fields(self.definition.config):
            default = None if field.name in CORE else field.default
            self.sizes[field.name] = identity.get(field.name, default)
        scaling = self.sizes.get("rope_scaling")
        # The other fields of a linear scaling have no influence.
        if isinstance(scaling, dict) and scaling.get("rope_type") == "linear":
            linear = ("rope_type", "factor")
            self.sizes["rope_scaling"] = {name: scaling[name] for name in linear if name in scaling}
        problem = broken_file(path, self.manifest.files, sums=False)
        if problem:
            raise CheckpointError(problem)
        metadata = read_metadata(path, self.manifest.files)
        # DCP calls tensors by fully qualified names (fqn); planner_data has the path, such as ("model", name).
        fqns = {}
        for fqn, tensor_path in (metadata.planner_data or {}).items():
            if tensor_path[0] == MODEL:
                fqns[tensor_path[1]] = fqn
        stored = {}
        for index, info in cast(dict, metadata.storage_data).items():
            stored[index.fqn, tuple(index.offset or ())] = info
        self.entries = {}
        # The chunks that a tensor was saved in, and where each is on disk.
        self._chunks: dict[str, list[_Chunk]] = {}
        for (group, *names), entry in shapes_in(metadata).items():
            if group != MODEL:
                continue
            name = names[0]
            self.entries[name] = TensorEntry(tuple(entry.size), entry.properties.dtype)
            self._chunks[name] = []
            for chunk in entry.chunks:
                info = stored[fqns[name], tuple(chunk.offsets)]
                self._chunks[name].append((chunk, info))
        # The tensor that was read last, and its chunks by offset. A chunk is read from disk as a whole, and its rows
        # are asked for one slab after another.
        self._cached_name = ""
        self._cached: dict[tuple[int, ...], Tensor] = {}
        self.lora = _lora(path, identity)
        self.small = {name: entry for name, entry in self.entries.items() if is_lora(name)}
        self.entries = {name: entry for name, entry in self.entries.items() if not is_lora(name)}
        _check_sizes(self.definition, self.sizes, self.entries, path)
        self._check_small()
        self.metadata = _metadata(path, self.manifest)

    def check(self, first: int = 0, every: int = 1) -> str | None:
        files = self.manifest.files
        names = sorted(files)[first::every]
        return broken_file(self.path, {name: files[name] for name in names})

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        if name != self._cached_name:
            self._cached_name = name
            self._cached = {}
        own = self._read_stored(name, self.entries[name], start, length, self._cached)
        module = name.removesuffix(".weight")
        name_of_a = f"{module}.{A}.weight"
        if self.lora is None or name_of_a not in self.small:
            return own
        rank = self.lora.rank
        first_row, first_column = start
        rows, columns = length
        # The same rows of B, and columns of A: (rows, rank) and (rank, columns).
        b = self.read_small(f"{module}.{B}.weight", (first_row, 0), (rows, rank))
        a = self.read_small(name_of_a, (0, first_column), (rank, columns))
        # In float64, so that a slice has the numbers of the full matrix after they are rounded.
        update = b.double() @ a.double()
        merged = own.double() + self.lora.scale * update
        return merged.to(own.dtype)

    def read_small(self, name: str, start: Sequence[int] = (0, 0), length: Sequence[int] | None = None) -> Tensor:
        """Read an A or a B, or a slice of it."""
        entry = self.small[name]
        return self._read_stored(name, entry, start, length or entry.shape, {})

    def _check_small(self) -> None:
        """Raise CheckpointError if the matrices of LoRA do not go with the model's own, or with the rank."""
        expected: dict[str, tuple[int, ...]] = {}
        for name in self.small:
            # layers.0.attention.wq of layers.0.attention.wq.lora_A.weight
            module = name.rsplit(".", 2)[0]
            own = self.entries.get(f"{module}.weight")
            if self.lora is None or own is None or len(own.shape) != 2:
                continue
            rank = self.lora.rank
            rows, columns = own.shape
            expected[f"{module}.{A}.weight"] = (rank, columns)
            expected[f"{module}.{B}.weight"] = (rows, rank)
        stored = {name: entry.shape for name, entry in self.small.items()}
        names = stored.keys() | expected.keys()
        for name in sorted(names):
            shape = stored.get(name, "missing")
            expected_shape = expected.get(name, "nothing")
            if shape != expected_shape:
                raise CheckpointError(
                    f"{self.path}: {name} is {shape}, and the model with its --lora makes it {expected_shape}"
                )

    def _read_stored(
        self,
        name: str,
        entry: TensorEntry,
        start: Sequence[int],
        length: Sequence[int],
        cached: dict[tuple[int, ...], Tensor],
    ) -> Tensor:
        """Read a slice of a tensor as it is on disk.

        Args:
            cached: chunks of the tensor that have been read, by offset. New ones are added.
        """
        result = torch.empty(tuple(length), dtype=entry.dtype)
        for chunk, place in self._chunks[name]:
            # Where the chunk and the slice overlap: indices in the chunk, and in the result.
            source = []
            target = []
            dims = zip(start, length, chunk.offsets, chunk.sizes, strict=True)
            for first, size, offset, extent in dims:
                low = max(first, offset)
                high = max(min(first + size, offset + extent), low)
                source.append(slice(low - offset, high - offset))
                target.append(slice(low - first, high - first))
            if any(overlap.start == overlap.stop for overlap in source):
                continue
            offsets = tuple(chunk.offsets)
            if offsets not in cached:
                shape = tuple(chunk.sizes)
                cached[offsets] = self._read_chunk(place, shape, result.dtype)
            tensor = cached[offsets]
            result[tuple(target)] = tensor[tuple(source)]
        return result

    def _read_chunk(self, place: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        path = self.path / place.relative_path
        try:
            with open_file(path) as file:
                file.seek(place.offset)
                content = io.BytesIO(file.read(place.length))
            tensor = torch.load(content, map_location="cpu", weights_only=True)
            # Nothing guarantees that the metadata describe this file.
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError("it holds another tensor than the metadata say")
            return tensor
        # Content that is not a tensor raises anything.
        except Exception as error:
            raise CheckpointError(f"{path} is not read: {one_line(error)}") from None


def _lora(path: Path, identity: Mapping[str, Any]) -> LoRA | None:
    """What a run with ``--lora`` has put next to the model's matrices. Raises CheckpointError: it is something else."""
    rank = identity.get("--lora")
    alpha = identity.get("--lora_alpha")
    targets = identity.get("--lora_targets")
    if rank is None:
        return None
    # Not `isinstance`: True is an int.
    is_rank = type(rank) is int and rank > 0
    is_alpha = type(alpha) is float and 0 < alpha < math.inf
    are_targets = False
    if isinstance(targets, list):
        are_targets = all(isinstance(target, str) for target in targets)
    if not (is_rank and is_alpha and are_targets):
        raise CheckpointError(f"{path} is damaged: its --lora is {short(rank)}, {short(alpha)}, {short(targets)}")
    names = tuple(cast(list, targets))
    return LoRA(cast(int, rank), cast(float, alpha), names)


def _check_sizes(
    definition: ModelDef, sizes: Mapping[str, Any], entries: Mapping[str, TensorEntry], path: Path
) -> None:
    """Raise CheckpointError if the tensors do not have the shapes that the sizes give."""
    if sizes.get("n_experts"):
        return
    n_layers = sizes["n_layers"]
    # Before a model is built: a number in a damaged file may be huge.
    if not isinstance(n_layers, int) or n_layers > len(entries):
        raise CheckpointError(f"{path}: {len(entries)} tensors are too few for {short(n_layers)} layers")
    try:
        shapes = shapes_of(definition, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    unknown = sorted(entries.keys() - shapes.keys())
    if unknown:
        raise CheckpointError(f"{path} has the tensor {short(unknown[0])}, which a model of these sizes does not have")
    for name, shape in shapes.items():
        if name not in entries:
            raise CheckpointError(f"{path}: {name} is not there, and the sizes of the model make it {shape}")
        if entries[name].shape != shape:
            raise CheckpointError(
                f"{path}: {name} is {entries[name].shape}, and the sizes of the model make it {shape}"
            )


def _metadata(path: Path, manifest: Manifest) -> ModelMetadata:
    """Read what `ModelMetadata.describe` has written. Raises CheckpointError: it is something else."""
    about = manifest.about
    name = about.get("tokenizer")
    # The name comes from the file: it must not lead elsewhere.
    if name not in (None, "") and (name not in TOKENIZERS or name not in manifest.files):
        known = ", ".join(TOKENIZERS)
        raise CheckpointError(f"{path} has the tokenizer {short(name)}, which is none of {known}")
    tokenizer = None
    if name == "":
        # The tokenizer of bytes has no file.
        tokenizer = ("", b"")
    elif name is not None:
        tokenizer = (name, read_tokenizer(path / name))
    bos = tokens_of(about, "bos", path / MANIFEST)
    eos = tokens_of(about, "eos", path / MANIFEST)
    base = about.get("base")
    if not isinstance(base, str | None):
        raise CheckpointError(f"{path}: its base is {short(base)}, which is not the path of weights")
    chat = about.get("chat")
    chat_format = None
    if chat is not None:
        try:
            chat_format = ChatFormat(**chat)
        except TypeError:
            raise CheckpointError(f"{path}: its chat template is {short(chat)}, which is not one") from None
    return ModelMetadata(
        block=about.get("block"),
        eos=eos,
        tokenizer=tokenizer,
        bos=bos,
        chat=chat_format,
        base=base,
        descriptions=read_descriptions(path),
    )


class _Slabs(DefaultSavePlanner):
    """Plans to save weights that are elsewhere, and reads each slab of rows when it is about to be written."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights

    def create_local_plan(self) -> SavePlan:
        items = []
        names = {}
        for name, entry in self.weights.entries.items():
            fqn = f"{MODEL}.{name}"
            names[fqn] = (MODEL, name)
            properties = TensorProperties(dtype=entry.dtype)
            shape = torch.Size(entry.shape)
            for start, length in entry.slabs():
                chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(length))
                about = TensorWriteData(chunk, properties, shape)
                index = MetadataIndex(fqn, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items, planner_data=names)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        name = write_item.index.fqn.removeprefix(f"{MODEL}.")
        start = tuple(chunk.offsets)
        length = tuple(chunk.sizes)
        return self.weights.read(name, start, length)


class _SlabWriter(Writer):
    """Writes one slab after another. PyTorch's own writer keeps all tensors of a file until it is closed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        # The name that DCP gives the first file of rank 0.
        name = "__0_0.distcp"
        results = []
        with self._files.create_stream(self._folder / name, "wb") as stream:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                # torch.save writes a tensor's whole storage, even if the tensor is a slice of it.
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()
                begin = stream.tell()
                torch.save(tensor, stream)
                size = stream.tell() - begin
                info = storage_info(name, begin, size)
                results.append(WriteResult(item.index, size, info))
            stream.flush()
            os.fsync(stream.fileno())
        future: Future = Future()
        future.set_result((results, self._files.sums))
        return future


def write_own(weights: Weights, folder: Path) -> None:
    """Write weights as a checkpoint of this package, a slab of rows at a time.

    The checkpoint is of step 0, without an optimizer's state. The folder gets its name when it is complete.

    Raises:
        CheckpointError: the folder exists, or it cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there already: give another folder, or remove it")
    metadata = weights.metadata
    partial = folder.with_name(folder.name + PARTIAL)
    identity = {"program": IMPORTED, **weights.sizes}
    about = {"from": str(weights.path), **metadata.describe()}
    manifest = Manifest(0, identity, {}, about, {})

    def finished(files: dict[str, FileSum]) -> None:
        own_files = metadata.write_files(partial)
        full = replace(manifest, files=files | own_files)
        full.write(partial)
        os.rename(partial, folder)

    try:
        with warnings.catch_warnings():
            # One process is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer = _SlabWriter(partial, finished)
            dcp.save({}, storage_writer=writer, planner=_Slabs(weights), no_dist=True)
    except (CheckpointException, OSError) as error:
        cause = first_failure(error)
        discard(partial)
        text = f"{folder} is not written: {one_line(cause)}"
        # A CheckpointError names the file already.
        if isinstance(cause, CheckpointError):
            text = str(cause)
        raise CheckpointError(text) from None
