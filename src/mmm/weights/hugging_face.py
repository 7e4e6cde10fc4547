"""Folders as `transformers` writes and reads them: config.json, safetensors in one file or several with an index."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmm.checkpoint import safetensors
from mmm.checkpoint.manifest import PARTIAL
from mmm.checkpoint.model_metadata import TOKENIZERS, ModelMetadata, read_tokenizer
from mmm.checkpoint.safetensors import refuse_pointer
from mmm.checkpoint.tensors import TensorEntry
from mmm.data.text.chat_format import CONFIGS, TEMPLATE, chat_format_of, first_tokens
from mmm.errors import CheckpointError
from mmm.history.record.folder import cannot_write
from mmm.models import keys
from mmm.models.definition import ModelDef, model_types, of_model_type
from mmm.models.names import HuggingFaceNames
from mmm.outside import is_plain_name, printable, read_json, short
from mmm.weights.no_weights import prefix_problem
from mmm.weights.weights import Weights, config_from, shapes_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
GENERATION = "generation_config.json"
SENTENCE_PIECE = TOKENIZERS[1]
SHARD = 5_000_000_000  # bytes of a file, of the tensors that fit


class HuggingFace(Weights):
    """A folder's weights.

    Raises:
        CheckpointError: a model that is not known (`mmm.models.keys`); a file or a tensor is missing, damaged, or
            of another shape; a tensor is in two files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json(path / CONFIG, CheckpointError)
        self.definition, self.names = known_model(config, path / CONFIG)
        self.sizes, passed_over = self.names.read(config, path / CONFIG)
        self._notes = keys.note_of(passed_over)
        places: dict[str, _Place] = {}  # by the name there
        for file in self._files():
            for name in file.entries:
                if name in places:
                    files = f"{places[name].file.path.name} and in {file.path.name}"
                    raise CheckpointError(
                        f"{path}: the tensor {printable(name)} is in {files}: remove the file that is wrong"
                    )
                places[name] = _Place(file, name)
        if self.sizes["tie_word_embeddings"] and self.names.there("output.weight") in places:
            self._tie(places)
        entries = {name: place.entry for name, place in places.items()}
        self.entries = check_entries(entries, self.definition, self.names, self.sizes, path)
        self._places = {name: places[self.names.there(name)] for name in self.entries}
        self.metadata = self._metadata(config)

    def _metadata(self, config: dict[str, Any]) -> ModelMetadata:
        """What the folder says besides the sizes: its tokenizer, and the tokens that begin and end a text."""
        eos: tuple[int, ...] = ()
        if (self.path / GENERATION).exists():  # it counts before config.json
            generation = read_json(self.path / GENERATION, CheckpointError)
            eos = keys.tokens_of(generation, "eos_token_id", self.path / GENERATION)
        eos = eos or keys.tokens_of(config, "eos_token_id", self.path / CONFIG)
        tokenizer = None
        bos: tuple[int, ...] = ()
        chat = None
        paths = [self.path / name for name in TOKENIZERS if (self.path / name).exists()]
        if paths:
            content = read_tokenizer(paths[0])
            refuse_pointer(paths[0], content)
            tokenizer = (paths[0].name, content)
            bos, note = first_tokens(tokenizer, self.path)
            if note:
                self._notes.append(note)
            chat = chat_format_of(self.path)
        return ModelMetadata(config.get("max_position_embeddings"), eos, tokenizer, tuple(self._notes), bos, chat)

    def _files(self) -> list[safetensors.SafetensorsFile]:
        """The files of tensors, as `transformers` chooses them: the one file, before an index that is there as well."""
        if (self.path / ONE_FILE).exists():
            if (self.path / INDEX).exists():
                self._notes.append(
                    f"{INDEX} is passed over, because {ONE_FILE} is there: transformers takes that first"
                )
            paths = [self.path / ONE_FILE]
        elif (self.path / INDEX).exists():
            names = read_json(self.path / INDEX, CheckpointError).get("weight_map")
            if not isinstance(names, dict) or not all(map(is_plain_name, names.values())):
                raise CheckpointError(f"{self.path / INDEX} has no weight_map of tensors to names of files beside it")
            paths = [self.path / name for name in sorted(set(names.values()))]
        else:
            paths = sorted(self.path.glob("*.safetensors"))
        for path in paths:
            if not path.exists():
                raise CheckpointError(f"{path} is missing")
        return [safetensors.SafetensorsFile(path) for path in paths]

    def _tie(self, places: dict[str, _Place]) -> None:
        """What ``tie_word_embeddings`` means where the files have an output matrix, as `transformers` has it: equal to
        the embedding, it is the embedding; the only one of the two is both; else they are not tied."""
        embedding = self.names.there("tok_embeddings.weight")
        head = self.names.there("output.weight")
        if embedding not in places:
            places[embedding] = places.pop(head)
        elif places[embedding].equals(places[head]):
            del places[head]
        else:
            self.sizes["tie_word_embeddings"] = False
            self._notes.append(f"tie_word_embeddings is true, but {head} is not {embedding}: the two are not tied")

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        place = self._places[name]
        if not self.names.is_rotated(name) or not length[0]:
            return place.read_finite(start, length)
        head = config_from(self.definition, self.sizes).head_dim
        # The rows of full heads, in which those that are wanted are.
        before = start[0] % head
        rows = -(-(before + length[0]) // head) * head
        heads = place.read_finite((start[0] - before, *start[1:]), (rows, *length[1:]))
        return to_pairs(heads, head)[before : before + length[0]].contiguous()


class _Place(NamedTuple):
    """Where a tensor is."""

    file: safetensors.SafetensorsFile
    name: str

    @property
    def entry(self) -> TensorEntry:
        return self.file.entries[self.name]

    def read(self, start: Sequence[int], length: Sequence[int]) -> Tensor:
        return self.file.read(self.name, tuple(start), tuple(length))

    def read_finite(self, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """Raises CheckpointError where an element is NaN or infinite."""
        tensor = self.read(start, length)
        finite = tensor.isfinite()
        if not finite.all():
            index = (~finite).nonzero()[0].tolist()
            value = tensor[tuple(index)].item()
            place = [first + offset for first, offset in zip(start, index, strict=True)]  # in the full tensor
            raise CheckpointError(
                f"{self.file.path}: {self.name} is {value} at {place}: the file is damaged, or the model had diverged"
            )
        return tensor

    def equals(self, other: _Place) -> bool:
        """Whether two tensors have the same shape, dtype and values; a slab of rows at a time."""
        same = self.entry == other.entry
        return same and all(torch.equal(self.read(*slab), other.read(*slab)) for slab in self.entry.slabs())


def export(weights: Weights, folder: Path, dtype: torch.dtype | None, shard: int, say: Callable[[str], None]) -> None:
    """Write a model as `transformers` reads it; the folder has its name once it is complete.

    Args:
        dtype: of floating-point tensors; None: as they are.
        shard: bytes of a file, at most, but for a tensor that has more by itself. say: called with a line for people.

    Raises:
        CheckpointError: a model with experts; sizes that no model has; the folder is there.
        RecordError: it cannot be written.
    """
    own_names = weights.definition.names
    if own_names is None:
        kind = weights.definition.name
        raise CheckpointError(f"{weights.path} is a {kind}, which is not written for transformers; mmm sample reads it")
    try:
        sizes = config_from(weights.definition, weights.sizes)
    except ValueError as error:
        raise CheckpointError(f"{weights.path}: {error}") from None
    config = own_names.write(sizes)
    if folder.exists():
        raise CheckpointError(f"{folder} is there already: give another folder, or remove it")
    entries: dict[str, TensorEntry] = {}  # by the name there
    names: dict[str, str] = {}  # by the name there, the name here
    elements: Counter[torch.dtype] = Counter()
    for name in shapes_of(weights.definition, weights.sizes):
        own = weights.entries[name]
        entry = TensorEntry(own.shape, dtype or own.dtype)
        entries[own_names.there(name)] = entry
        names[own_names.there(name)] = name
        elements[entry.dtype] += entry.elements
    metadata = weights.metadata
    kind = str(elements.most_common(1)[0][0]).removeprefix("torch.")  # transformers loads all tensors in it
    bos = metadata.bos
    eos = metadata.eos
    config |= {
        "rope_scaling": weights.sizes["rope_scaling"],
        "max_position_embeddings": metadata.block or 2048,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "torch_dtype": kind,
    }

    def tensor(other: str) -> Tensor:
        name = names[other]
        shape = entries[other].shape
        full = weights.read(name, [0] * len(shape), shape).to(entries[other].dtype)
        return to_halves(full, sizes.head_dim) if own_names.is_rotated(name) else full

    files = _shards(entries, shard)
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for file_name, others in files.items():
            with open(partial / file_name, "wb") as file:
                file.write(safetensors.header_of({other: entries[other] for other in others}))
                safetensors.write(file, map(tensor, others))
                file.flush()
                os.fsync(file.fileno())
        if len(files) > 1:
            weight_map = {other: file_name for file_name, others in files.items() for other in others}
            total = sum(entry.bytes for entry in entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=2))
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if metadata.tokenizer is not None:
            file_name, content = metadata.tokenizer
            if file_name and not content.startswith(b'{"kind": "chars"'):
                (partial / file_name).write_bytes(content)
                _write_tokenizer_config(partial, metadata)
            else:
                say("the tokenizer is bytes or characters, which transformers has no file for: it is left out")
        os.rename(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_write(folder, error) from None


def _write_tokenizer_config(folder: Path, metadata: ModelMetadata) -> None:
    """What the tokenizer's file does not say: a SentencePiece model, whether texts begin with BOS; a chat template."""
    about: dict[str, Any] = {}
    if metadata.tokenizer is not None and metadata.tokenizer[0] == SENTENCE_PIECE:
        about["add_bos_token"] = bool(metadata.bos)
    if metadata.chat is not None and metadata.chat.template:
        about |= metadata.chat.special_tokens
        (folder / TEMPLATE).write_text(metadata.chat.template, encoding="utf-8")
    if about:
        (folder / CONFIGS[1]).write_text(json.dumps(about))


def _shards(entries: dict[str, TensorEntry], most: int) -> dict[str, list[str]]:
    """The names of each file's tensors."""
    groups: list[list[str]] = [[]]
    room = most
    for name, entry in entries.items():
        if entry.bytes > room and groups[-1]:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= entry.bytes
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, start=1)}


def known_model(config: Mapping[str, Any], where: object) -> tuple[ModelDef, HuggingFaceNames]:
    """The model of a config.json, and its names there. Raises CheckpointError: it is not known."""
    model_type = config.get("model_type")
    definition = of_model_type(model_type)
    if definition is None or definition.names is None:
        known = ", ".join(model_types())
        raise CheckpointError(f"{where}: model_type is {short(model_type)}; those that are known are {known}")
    return definition, definition.names


def check_entries(
    there: Mapping[str, TensorEntry],
    definition: ModelDef,
    names: HuggingFaceNames,
    sizes: Mapping[str, Any],
    where: object,
) -> dict[str, TensorEntry]:
    """The tensors of a model, by their names in this package.

    Args:
        there: what the files have, by Hugging Face's names.

    Raises:
        CheckpointError: one is missing, is of another shape, or is of no use.
    """
    if sizes["n_layers"] > len(there):
        raise CheckpointError(f"{where} has {len(there)} tensors, which are too few for {sizes['n_layers']} layers")
    found: dict[str, TensorEntry] = {}
    shapes = shapes_of(definition, sizes)
    known = {*map(names.there, shapes), names.there("output.weight")}
    for name, shape in shapes.items():
        other = names.there(name)
        if other not in there:
            raise CheckpointError(f"{where} lacks the tensor {other}{prefix_problem(list(there), other)}")
        if there[other].shape != shape:
            stored, expected = (("×".join(map(str, each)) or "scalar") for each in (there[other].shape, shape))
            raise CheckpointError(f"{where}: {other} is {stored}, and the sizes of the model make it {expected}")
        if not there[other].dtype.is_floating_point:
            raise CheckpointError(f"{where}: {other} is of dtype {there[other].dtype}, which is no floating-point one")
        found[name] = there[other]
    useless = [name for name in there if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if useless:
        raise CheckpointError(f"{where} has the unknown tensor {printable(useless[0])}: it may change the computation")
    return found


def to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of full heads in the order of Hugging Face's files.

    Args:
        rows: (heads · head_dim, …), in the order here.
    """
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """The reverse of `to_halves`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
