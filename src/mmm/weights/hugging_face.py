"""Reads and writes folders of `transformers`: config.json, and safetensors in one file or in several with an index."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmm.checkpoint import safetensors
from mmm.checkpoint.manifest import PARTIAL
from mmm.checkpoint.model_metadata import (
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIGS,
    TOKENIZERS,
    ModelMetadata,
    read_descriptions,
    read_tokenizer,
)
from mmm.checkpoint.safetensors import refuse_pointer
from mmm.checkpoint.tensors import TensorEntry
from mmm.data.text.chat_format import TEMPLATE, chat_format_of, first_tokens
from mmm.data.text.tokenizer import CharTokenizer
from mmm.errors import CheckpointError
from mmm.history.record.folder import cannot_write
from mmm.models import keys
from mmm.models.definition import ModelDef, model_types, of_model_type
from mmm.models.names import HuggingFaceNames
from mmm.outside import is_plain_name, printable, read_json, short
from mmm.weights.no_weights import prefix_problem
from mmm.weights.weights import Weights, config_from, config_of, shapes_of

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
SENTENCE_PIECE = TOKENIZERS[1]
# Default size of a file in bytes; the tensors that fit are put into it.
SHARD = 5_000_000_000


class HuggingFace(Weights):
    """The weights in a folder of `transformers`.

    Raises:
        CheckpointError: the model is not known (`mmm.models.keys`); a file or a tensor is missing, damaged, or has
            another shape; a tensor is in two files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json(path / CONFIG, CheckpointError)
        self.definition, self.names, config = known_model(config, path / CONFIG)
        self.sizes, passed_over = self.names.read(config, path / CONFIG)
        self._notes = keys.note_of(passed_over)
        # By Hugging Face's names.
        places: dict[str, _Place] = {}
        for file in self._files():
            for name in file.entries:
                if name in places:
                    first_file = places[name].file.path.name
                    raise CheckpointError(
                        f"{path}: the tensor {printable(name)} is in {first_file} and in {file.path.name}: remove the "
                        "file that is wrong"
                    )
                places[name] = _Place(file, name)
        head = self.names.there("output.weight")
        if self.sizes["tie_word_embeddings"] and head in places:
            self._tie(places)
        stored = {name: place.entry for name, place in places.items()}
        self.entries = check_entries(stored, self.definition, self.names, self.sizes, path)
        # By this package's names.
        self._places = {name: places[self.names.there(name)] for name in self.entries}
        self.metadata = self._metadata(config)

    def _metadata(self, config: dict[str, Any]) -> ModelMetadata:
        """Read what the folder says besides the sizes: its tokenizer, and the tokens that begin and end a text."""
        descriptions = read_descriptions(self.path)
        tokenizer = None
        bos: tuple[int, ...] = ()
        chat = None
        for name in TOKENIZERS:
            path = self.path / name
            if not path.exists():
                continue
            content = read_tokenizer(path)
            refuse_pointer(path, content)
            tokenizer = (name, content)
            bos, note = first_tokens(tokenizer, self.path)
            if note:
                self._notes.append(note)
            chat = chat_format_of(self.path)
            # A tokenizer.json counts before a tokenizer.model.
            break
        return ModelMetadata(
            block=config["max_position_embeddings"],
            eos=_ends_of_texts(config, descriptions.get(GENERATION, {}), self.path),
            tokenizer=tokenizer,
            notes=tuple(self._notes),
            bos=bos,
            chat=chat,
            base=str(self.path.absolute()),
            descriptions=descriptions,
        )

    def _files(self) -> list[safetensors.SafetensorsFile]:
        """Open the files of tensors, chosen as `transformers` does: the one file counts before an index."""
        one_file = self.path / ONE_FILE
        index = self.path / INDEX
        if one_file.exists():
            if index.exists():
                self._notes.append(
                    f"{INDEX} is passed over, because {ONE_FILE} is there: transformers takes that first"
                )
            paths = [one_file]
        elif index.exists():
            # Tensor → name of its file.
            weight_map = read_json(index, CheckpointError).get("weight_map")
            if not isinstance(weight_map, dict) or not all(map(is_plain_name, weight_map.values())):
                raise CheckpointError(f"{index} has no weight_map of tensors to names of files next to it")
            names = sorted(set(weight_map.values()))
            paths = [self.path / name for name in names]
        else:
            paths = sorted(self.path.glob("*.safetensors"))
        for path in paths:
            if not path.exists():
                raise CheckpointError(f"{path} is missing")
        return [safetensors.SafetensorsFile(path) for path in paths]

    def _tie(self, places: dict[str, _Place]) -> None:
        """Apply ``tie_word_embeddings`` to files that have an output matrix, as `transformers` does.

        If the output matrix equals the embedding, it is the embedding. If the embedding is missing, the output matrix
        is both. If they differ, they are not tied.
        """
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
        head_dim = config_from(self.definition, self.sizes).head_dim
        # The order of rows differs within a head: read the full heads that the rows are in.
        offset = start[0] % head_dim
        end = offset + length[0]
        n_rows = -(-end // head_dim) * head_dim
        # (heads · head_dim, …)
        heads = place.read_finite((start[0] - offset, *start[1:]), (n_rows, *length[1:]))
        rows = to_pairs(heads, head_dim)
        return rows[offset:end].contiguous()


class _Place(NamedTuple):
    """Where a tensor is: its file, and its name in it."""

    file: safetensors.SafetensorsFile
    name: str

    @property
    def entry(self) -> TensorEntry:
        return self.file.entries[self.name]

    def read(self, start: Sequence[int], length: Sequence[int]) -> Tensor:
        return self.file.read(self.name, tuple(start), tuple(length))

    def read_finite(self, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """Read a slice. Raises CheckpointError: an element is NaN or infinite."""
        tensor = self.read(start, length)
        finite = tensor.isfinite()
        if not finite.all():
            not_finite = (~finite).nonzero()
            index = not_finite[0].tolist()
            value = tensor[tuple(index)].item()
            # Its index in the full tensor, not in the slice.
            position = [first + offset for first, offset in zip(start, index, strict=True)]
            raise CheckpointError(
                f"{self.file.path}: {self.name} is {value} at {position}: the file is damaged, or the model had "
                "diverged"
            )
        return tensor

    def equals(self, other: _Place) -> bool:
        """Whether two tensors have the same shape, dtype and values. They are read a slab of rows at a time."""
        if self.entry != other.entry:
            return False
        for start, length in self.entry.slabs():
            own_rows = self.read(start, length)
            other_rows = other.read(start, length)
            if not torch.equal(own_rows, other_rows):
                return False
        return True


def export(
    weights: Weights,
    folder: Path,
    dtype: torch.dtype | None,
    shard: int,
    say: Callable[[str], None],
) -> None:
    """Write a model in the form that `transformers` reads. The folder gets its name when it is complete.

    Args:
        weights: the model.
        folder: folder to make.
        dtype: dtype of floating-point tensors; None keeps theirs.
        shard: the most bytes of a file, unless a single tensor is larger.
        say: called with a line for people.

    Raises:
        CheckpointError: the model is not one that is written for `transformers`, such as one with experts; no model has
            its sizes; or the folder exists.
        RecordError: the folder cannot be written.
    """
    definition = weights.definition
    own_names = definition.names
    if own_names is None:
        raise CheckpointError(
            f"{weights.path} is a {definition.name}, which is not written for transformers; mmm sample reads it"
        )
    sizes = config_of(weights)
    written = own_names.write(sizes)
    # By Hugging Face's names: what is written, and the name in this package.
    entries: dict[str, TensorEntry] = {}
    names: dict[str, str] = {}
    elements: Counter[torch.dtype] = Counter()
    for name in shapes_of(definition, weights.sizes):
        own = weights.entries[name]
        entry = TensorEntry(own.shape, dtype or own.dtype)
        other_name = own_names.there(name)
        entries[other_name] = entry
        names[other_name] = name
        elements[entry.dtype] += entry.elements
    # transformers loads all tensors in one dtype: the most frequent one.
    most_frequent = elements.most_common(1)[0][0]
    described = _described(weights, written, most_frequent)
    if weights.metadata.tokenizer is not None and described.tokenizer is None:
        say("the tokenizer is bytes or characters, which transformers has no file for: it is left out")

    def tensor(other_name: str) -> Tensor:
        name = names[other_name]
        entry = entries[other_name]
        start = [0] * len(entry.shape)
        full = weights.read(name, start, entry.shape).to(entry.dtype)
        if own_names.is_rotated(name):
            return to_halves(full, sizes.head_dim)
        return full

    files = _shards(entries, shard)
    with new_folder(folder) as partial:
        for file_name, other_names in files.items():
            of_file = {other_name: entries[other_name] for other_name in other_names}
            # One tensor in memory at a time.
            write_tensors(partial / file_name, of_file, map(tensor, other_names))
        if len(files) > 1:
            _write_index(partial, files, entries)
        described.write_files(partial)
        if described.chat is not None and described.chat.template:
            (partial / TEMPLATE).write_text(described.chat.template, encoding="utf-8")


def _described(weights: Weights, written: Mapping[str, Any], dtype: torch.dtype) -> ModelMetadata:
    """What an export says of its model: what the folder of its weights said, except for what training has changed.

    Args:
        written: what a config.json says of the sizes, by `HuggingFaceNames.write`.
        dtype: the dtype that `transformers` loads the tensors in.

    Returns:
        The tokenizer, the descriptions and the chat format to write.
    """
    metadata = weights.metadata
    descriptions = {name: {**content} for name, content in metadata.descriptions.items()}
    # Drawn weights come from no folder.
    drawn = {**written, "rope_scaling": weights.sizes["rope_scaling"], "bos_token_id": None, "eos_token_id": None}
    if metadata.bos:
        drawn["bos_token_id"] = metadata.bos[0]
    config = descriptions.setdefault(CONFIG, drawn)
    # A config.json may say that two matrices are tied that are not.
    config["tie_word_embeddings"] = written["tie_word_embeddings"]
    config["max_position_embeddings"] = metadata.block or 2048
    # Newer releases call it dtype, and read either.
    config.pop("dtype", None)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    generation = descriptions.get(GENERATION, {})
    if metadata.eos != _ends_of_texts(config, generation, weights.path):
        eos: Any = list(metadata.eos)
        if len(eos) == 1:
            eos = eos[0]
        config["eos_token_id"] = eos
        # Not written if the folder had none.
        generation["eos_token_id"] = eos
    tokenizer = metadata.tokenizer
    # The file of a tokenizer of characters is this package's own.
    if tokenizer is None or not tokenizer[0] or tokenizer[1].startswith(CharTokenizer.HEAD):
        return replace(metadata, descriptions=descriptions, tokenizer=None, chat=None)
    # What a tokenizer's file lacks: special tokens, and for SentencePiece whether texts begin with BOS.
    made: dict[str, Any] = {}
    if metadata.chat is not None:
        made |= metadata.chat.special_tokens
    if tokenizer[0] == SENTENCE_PIECE:
        made["add_bos_token"] = bool(metadata.bos)
    descriptions.setdefault(TOKENIZER_CONFIGS[1], made)
    return replace(metadata, descriptions=descriptions)


def _ends_of_texts(config: Mapping[str, Any], generation: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """The tokens that end a text. A generation_config.json counts before a config.json."""
    ends = keys.tokens_of(generation, "eos_token_id", folder / GENERATION)
    return ends or keys.tokens_of(config, "eos_token_id", folder / CONFIG)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that gets its name when it is complete. Inside, files are written to the path that is yielded.

    Raises:
        CheckpointError: the folder exists.
        RecordError: it cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there already: give another folder, or remove it")
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        os.rename(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_write(folder, error) from None


def write_tensors(path: Path, entries: Mapping[str, TensorEntry], tensors: Iterator[Tensor]) -> None:
    """Write a file of safetensors, to the disk itself.

    Args:
        entries: shape and dtype of each tensor, by name.
        tensors: the tensors, in this order.
    """
    with open(path, "wb") as file:
        file.write(safetensors.header_of(entries))
        safetensors.write(file, tensors)
        file.flush()
        os.fsync(file.fileno())


def _write_index(folder: Path, files: Mapping[str, Sequence[str]], entries: Mapping[str, TensorEntry]) -> None:
    """Write which file each tensor is in."""
    weight_map = {}
    for file_name, names in files.items():
        for name in names:
            weight_map[name] = file_name
    total = sum(entry.bytes for entry in entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _shards(entries: dict[str, TensorEntry], most: int) -> dict[str, list[str]]:
    """Distribute tensors over files, in order. Returns file name → names of its tensors.

    Args:
        most: the most bytes of tensors in a file, unless a single tensor is larger.
    """
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
    n_files = len(groups)
    files = {}
    for file_number, names in enumerate(groups, start=1):
        file_name = f"model-{file_number:05}-of-{n_files:05}.safetensors"
        files[file_name] = names
    return files


def known_model(config: Mapping[str, Any], where: object) -> tuple[ModelDef, HuggingFaceNames, dict[str, Any]]:
    """The model that a config.json describes, what Hugging Face calls its tensors, and the config.json with the keys
    that it lacks.

    Args:
        where: the file, for messages.

    Raises:
        CheckpointError: the model is not known, or a number is too large for any size.
    """
    _check_integers(config, where)
    model_type = config.get("model_type")
    definition = of_model_type(model_type)
    if definition is None or definition.names is None:
        known = ", ".join(model_types())
        raise CheckpointError(f"{where}: model_type is {short(model_type)}; those that are known are {known}")
    return definition, definition.names, {**definition.names.defaults[config["model_type"]], **config}


def _check_integers(config: Mapping[str, Any], where: object) -> None:
    """Refuse integers of more than 64 bits, at any depth: neither PyTorch nor a float takes them.

    Raises:
        CheckpointError: there is one.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_integers(value, where)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise CheckpointError(f"{where}: {short(key)} is {short(value)}, which does not fit in 64 bits")


def check_entries(
    stored: Mapping[str, TensorEntry],
    definition: ModelDef,
    names: HuggingFaceNames,
    sizes: Mapping[str, Any],
    where: object,
) -> dict[str, TensorEntry]:
    """Check that the files have the tensors of a model and no others. Returns them by their names in this package.

    Args:
        stored: the tensors in the files, by Hugging Face's names.
        definition: the model.
        names: what Hugging Face calls its tensors.
        sizes: the fields of the model's sizes.
        where: the folder, for messages.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or is not known.
    """
    # Before a model is built: a number in a damaged file may be huge.
    n_layers = sizes["n_layers"]
    if n_layers > len(stored):
        raise CheckpointError(f"{where} has {len(stored)} tensors, which are too few for {n_layers} layers")
    entries: dict[str, TensorEntry] = {}
    shapes = shapes_of(definition, sizes)
    # A tied output matrix may be in the files, although the model does not have it.
    known = {names.there("output.weight")}
    for name, shape in shapes.items():
        other_name = names.there(name)
        known.add(other_name)
        entry = stored.get(other_name)
        if entry is None:
            problem = prefix_problem(list(stored), other_name)
            raise CheckpointError(f"{where} lacks the tensor {other_name}{problem}")
        if entry.shape != shape:
            raise CheckpointError(
                f"{where}: {other_name} is {_times(entry.shape)}, and the sizes of the model make it {_times(shape)}"
            )
        if not entry.dtype.is_floating_point:
            raise CheckpointError(f"{where}: {other_name} is of dtype {entry.dtype}, which is not a floating-point one")
        entries[name] = entry
    for other_name in stored:
        # Older files keep the frequencies of rotary positions, which are computed here.
        if other_name not in known and not other_name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(
                f"{where} has the unknown tensor {printable(other_name)}: it may change the computation"
            )
    return entries


def _times(shape: tuple[int, ...]) -> str:
    """A shape for messages, such as ``67×32``."""
    return "×".join(map(str, shape)) or "scalar"


def to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of full heads from this package's order to that of Hugging Face's files (`mmm.models.names`).

    Args:
        rows: (heads · head_dim, …).
    """
    # (heads, head_dim / 2, 2, …) → (heads, 2, head_dim / 2, …)
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def to_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """The reverse of `to_halves`."""
    # (heads, 2, head_dim / 2, …) → (heads, head_dim / 2, 2, …)
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)
