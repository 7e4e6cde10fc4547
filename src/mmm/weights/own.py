"""The weights of this package's own checkpoints: read as a resumed run reads them, and written from other weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from mmm.checkpoint.manifest import MANIFEST, PARTIAL, FileSum, Manifest, broken_file, discard, read_manifest
from mmm.checkpoint.model_metadata import TOKENIZERS, ChatFormat, ModelMetadata, read_descriptions, read_tokenizer
from mmm.checkpoint.state import MODEL, failed, shapes_of
from mmm.checkpoint.storage import Writer, read_metadata, read_part
from mmm.checkpoint.tensors import TensorEntry
from mmm.errors import CheckpointError
from mmm.models.definition import of_fields
from mmm.models.keys import tokens_of
from mmm.nn.lora import A, B, LoRA, is_lora
from mmm.outside import short
from mmm.weights.weights import Weights, check_entries, check_new

# Programs whose checkpoints hold a language model.
TRAINED = "lm"
IMPORTED = "import"
# Sizes that every checkpoint has.
CORE = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")


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
            needed = {name: scaling[name] for name in linear if name in scaling}
            self.sizes["rope_scaling"] = needed
        problem = broken_file(path, self.manifest.files, sums=False)
        if problem:
            raise CheckpointError(problem)
        self._stored = read_metadata(path, self.manifest.files)
        self.lora = _lora(path, identity)
        self.entries = {}
        self.small: dict[str, TensorEntry] = {}
        for (group, *names), entry in shapes_of(self._stored).items():
            if group == MODEL:
                name = names[0]
                entries = self.small if is_lora(name) else self.entries
                entries[name] = TensorEntry(tuple(entry.size), entry.properties.dtype)
        # Experts have biases that balance them, which are buffers and no parameters.
        if not self.sizes.get("n_experts"):
            self.entries = check_entries(self.entries, self.definition, self.sizes, path)
        self._check_small()
        self.metadata = _metadata(path, self.manifest)

    def check(self, first: int = 0, every: int = 1) -> str | None:
        files = self.manifest.files
        names = sorted(files)[first::every]
        return broken_file(self.path, {name: files[name] for name in names})

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        own = read_part(self.path, self._stored, f"{MODEL}.{name}", start, length)
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
        if length is None:
            length = self.small[name].shape
        return read_part(self.path, self._stored, f"{MODEL}.{name}", start, length)

    def _check_small(self) -> None:
        """Raise CheckpointError if the matrices of LoRA do not go with the model's own, or with the rank."""
        rank = 0 if self.lora is None else self.lora.rank
        for name, entry in self.small.items():
            # layers.0.attention.wq, lora_A of layers.0.attention.wq.lora_A.weight
            module, letter, _ = name.rsplit(".", 2)
            rows, columns = self.entries[f"{module}.weight"].shape
            expected = (rank, columns) if letter == A else (rows, rank)
            if entry.shape != expected:
                raise CheckpointError(f"{self.path}: {name} is {entry.shape}, and its --lora makes it {expected}")


def _lora(path: Path, identity: Mapping[str, Any]) -> LoRA | None:
    """What a run with ``--lora`` has put next to the model's matrices. Raises CheckpointError: it is something else."""
    rank = identity.get("--lora")
    alpha = identity.get("--lora_alpha")
    if rank is None:
        return None
    if type(rank) is not int or type(alpha) is not float:
        raise CheckpointError(f"{path} is damaged: its --lora is {short(rank)}, {short(alpha)}")
    return LoRA(rank, alpha, tuple(identity.get("--lora_targets") or ()))


def _metadata(path: Path, manifest: Manifest) -> ModelMetadata:
    """Read what `ModelMetadata.describe` has written. Raises CheckpointError: it is something else."""
    about = manifest.about
    name = about.get("tokenizer")
    # The tokenizer of bytes has no file, and an empty name.
    tokenizer = None if name is None else (name, b"")
    if name not in (None, ""):
        # The name comes from the file: it must not lead elsewhere.
        if name not in TOKENIZERS or name not in manifest.files:
            known = ", ".join(TOKENIZERS)
            raise CheckpointError(f"{path} has the tokenizer {short(name)}, which is none of {known}")
        tokenizer = (name, read_tokenizer(path / name))
    block = about.get("block")
    base = about.get("base")
    if type(block) not in (int, NoneType) or type(base) not in (str, NoneType):
        raise CheckpointError(f"{path / MANIFEST} is damaged: its block is {short(block)}, its base {short(base)}")
    return ModelMetadata(
        block=block,
        eos=tokens_of(about, "eos", path / MANIFEST),
        tokenizer=tokenizer,
        bos=tokens_of(about, "bos", path / MANIFEST),
        chat=_chat(path, about.get("chat")),
        base=base,
        descriptions=read_descriptions(path),
    )


def _chat(path: Path, fields: Any) -> ChatFormat | None:
    """Read a chat format from its fields. Raises CheckpointError: they are something else."""
    if fields is None:
        return None
    try:
        chat = ChatFormat(**fields)
        # It raises where one of them is no text, or none that a file can hold.
        "".join([chat.template, *chat.special_tokens.values()]).encode()
    except (TypeError, AttributeError, UnicodeEncodeError):
        raise CheckpointError(f"{path / MANIFEST} is damaged: its chat format is {short(fields)}") from None
    return chat


class _Planner(DefaultSavePlanner):
    """Saves weights that are elsewhere: each tensor is read when it is about to be written."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        name = index.fqn.removeprefix(f"{MODEL}.")
        return self.weights.read_full(name)


def write_own(weights: Weights, folder: Path) -> None:
    """Write weights as a checkpoint of this package, with one tensor in memory at a time.

    The checkpoint is of step 0, without an optimizer's state. The folder gets its name when it is complete.

    Raises:
        CheckpointError: the folder exists, or it cannot be written.
    """
    check_new(folder)
    partial = folder.with_name(folder.name + PARTIAL)
    identity = {"program": IMPORTED, **weights.sizes}
    about = {"from": str(weights.path), **weights.metadata.describe()}

    def finished(files: dict[str, FileSum]) -> None:
        own_files = weights.metadata.write_files(partial)
        manifest = Manifest(0, identity, {}, about, files | own_files)
        manifest.write(partial)
        os.rename(partial, folder)

    # Only their shapes are asked for.
    tensors = {}
    for name, entry in weights.entries.items():
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    writer = Writer(partial, finished, file_per_tensor=True)
    try:
        with warnings.catch_warnings():
            # One process is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({MODEL: tensors}, storage_writer=writer, planner=_Planner(weights), no_dist=True)
    except (CheckpointException, OSError) as error:
        discard(partial)
        raise failed(error, f"{folder} is not written") from None
