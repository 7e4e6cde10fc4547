"""Reads and writes folders of `transformers`: config.json, and safetensors in one file or in several with an index."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

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
from mmm.checkpoint.safetensors import SafetensorsFile, refuse_pointer
from mmm.checkpoint.tensors import TensorEntry
from mmm.data.text.chat_format import TEMPLATE, chat_format_of, first_tokens
from mmm.data.text.tokenizer import CharTokenizer, tokenizer_of
from mmm.errors import CheckpointError
from mmm.history.record.folder import cannot_write
from mmm.models import keys
from mmm.models.definition import ModelDef, model_types, of_model_type
from mmm.models.names import HuggingFaceNames
from mmm.outside import is_plain_name, printable, read_json, short
from mmm.weights.weights import Weights, check_entries, check_new, config_from, config_of

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
SENTENCE_PIECE = TOKENIZERS[1]
# Ends of the names of what older files keep and is computed here: frequencies of rotary positions, and GPT-2's masks.
COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# The number of an expert in the name of a matrix.
EXPERT = re.compile(r"\.experts\.(\d+)\.")


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
        self.sizes = self.names.read(config, path / CONFIG)
        self._notes: list[str] = []
        # By Hugging Face's names.
        places: dict[str, _Place] = {}
        head = self.names.there("output.weight")
        for file in self._files():
            for stored_name, entry in file.entries.items():
                name = stored_name
                if not name.startswith((self.names.prefix, head)):
                    name = self.names.prefix + name
                if name in places:
                    first_file = places[name].file.path.name
                    raise CheckpointError(
                        f"{path}: the tensor {printable(stored_name)} is in {first_file} and in {file.path.name}: "
                        "remove the file that is wrong"
                    )
                if not name.endswith(COMPUTED):
                    places[name] = _Place(file, stored_name, entry, name.endswith(self.names.transposed))
        # A GPT's are always tied.
        if self.sizes.get("tie_word_embeddings", True) and head in places:
            self._tie(places)
        stacked = self._stacked(places)
        stored = {name: place.entry for name, place in stacked.items()}
        self.entries = check_entries(stored, self.definition, self.sizes, path, self.names.there)
        # By this package's names.
        self._places = {name: stacked[self.names.there(name)] for name in self.entries}
        self.metadata = self._metadata(config)

    def _metadata(self, config: dict[str, Any]) -> ModelMetadata:
        """Read what the folder says besides the sizes: its tokenizer, and the tokens that begin and end a text."""
        descriptions = read_descriptions(self.path)
        tokenizer = None
        bos: tuple[int, ...] = ()
        chat = None
        # A tokenizer.json counts before a tokenizer.model.
        present = [name for name in TOKENIZERS if (self.path / name).exists()]
        if present:
            content = read_tokenizer(self.path / present[0])
            refuse_pointer(self.path / present[0], content)
            tokenizer = (present[0], content)
            made = tokenizer_of(self.path / present[0], content)
            bos = first_tokens(made, self.path)
            chat = chat_format_of(self.path)
        return ModelMetadata(
            block=config[self.names.longest],
            eos=_ends_of_texts(config, descriptions.get(GENERATION, {}), self.path),
            tokenizer=tokenizer,
            notes=tuple(self._notes),
            bos=bos,
            chat=chat,
            base=str(self.path.absolute()),
            descriptions=descriptions,
        )

    def _files(self) -> list[SafetensorsFile]:
        """Open the files of tensors, chosen as `transformers` does: the one file counts before an index."""
        index = self.path / INDEX
        paths = sorted(self.path.glob("*.safetensors"))
        if (self.path / ONE_FILE).exists():
            if index.exists():
                self._notes.append(
                    f"{INDEX} is passed over, because {ONE_FILE} is there: transformers takes that first"
                )
            paths = [self.path / ONE_FILE]
        elif index.exists():
            # Tensor → name of its file.
            weight_map = read_json(index, CheckpointError).get("weight_map")
            if not isinstance(weight_map, dict) or not all(map(is_plain_name, weight_map.values())):
                raise CheckpointError(f"{index} has no weight_map of tensors to names of files next to it")
            paths = [self.path / name for name in sorted(set(weight_map.values()))]
        return [SafetensorsFile(path) for path in paths]

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
        elif "tie_word_embeddings" not in self.sizes:
            raise CheckpointError(
                f"{self.path}: {head} is not {embedding}, and a {self.definition.name} has one for both"
            )
        else:
            self.sizes["tie_word_embeddings"] = False
            self._notes.append(f"tie_word_embeddings is true, but {head} is not {embedding}: the two are not tied")

    def _stacked(self, places: Mapping[str, _Place]) -> dict[str, _Place | _Stack]:
        """Stack the matrices of experts: experts.0, experts.1, … become experts.#.

        Raises:
            CheckpointError: an expert is missing, or differs from the first in shape or dtype.
        """
        stacked: dict[str, _Place | _Stack] = {}
        # Name of a stack → the matrix of each expert, by its number.
        stacks: dict[str, dict[str, _Place]] = defaultdict(dict)
        for name, place in places.items():
            match = EXPERT.search(name)
            if match is None:
                stacked[name] = place
            else:
                stacks[name.replace(match[0], ".experts.#.", 1)][match[1]] = place
        for name, by_number in stacks.items():
            matrices: list[_Place] = []
            for expert in map(str, range(len(by_number))):
                matrix = by_number.get(expert)
                if matrix is None or (matrices and matrix.entry != matrices[0].entry):
                    reason = "has another shape or dtype than that of expert 0" if matrix else "is missing"
                    raise CheckpointError(f"{self.path}: {printable(name.replace('#', expert))} {reason}")
                matrices.append(matrix)
            one = matrices[0].entry
            stacked[name] = _Stack(matrices, TensorEntry((len(matrices), *one.shape), one.dtype))
        return stacked

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        place = self._places[name]
        is_fused = name.endswith(self.names.fused)
        if not (is_fused or self.names.is_rotated(name)) or not length[0]:
            return place.read(start, length)
        head_dim = config_from(self.definition, self.sizes).head_dim
        if is_fused:
            # The rows of a head are in three places: read all.
            offset = start[0]
            n_rows = place.entry.shape[0]
        else:
            # The order of rows differs within a head: read the full heads that the rows are in.
            offset = start[0] % head_dim
            n_rows = -(-(offset + length[0]) // head_dim) * head_dim
        # (heads · head_dim, …)
        heads = place.read((start[0] - offset, *start[1:]), (n_rows, *length[1:]))
        rows = by_head(heads, head_dim) if is_fused else to_pairs(heads, head_dim)
        return rows[offset : offset + length[0]].contiguous()


class _Stack(NamedTuple):
    """The matrices of the experts of a layer, which are one tensor here: shape and dtype of all together."""

    matrices: list[_Place]
    entry: TensorEntry

    def read(self, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """Read a slice, as `_Place.read`."""
        # (experts, rows, columns)
        tensor = torch.empty(*length, dtype=self.entry.dtype)
        for own, matrix in zip(tensor, self.matrices[start[0] :], strict=False):
            own.copy_(matrix.read(start[1:], length[1:]))
        return tensor


class _Place(NamedTuple):
    """A tensor on disk: its file, its name and entry in it, and whether it is a matrix that is kept as (in, out)."""

    file: SafetensorsFile
    name: str
    stored: TensorEntry
    transposed: bool

    @property
    def entry(self) -> TensorEntry:
        """Shape and dtype as the model has them."""
        if self.transposed:
            return TensorEntry(self.stored.shape[::-1], self.stored.dtype)
        return self.stored

    def read(self, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """Read a slice. Raises CheckpointError: an element is NaN or infinite."""
        if self.transposed:
            tensor = self.file.read(self.name, start[::-1], length[::-1]).t().contiguous()
        else:
            tensor = self.file.read(self.name, start, length)
        finite = tensor.isfinite()
        if not finite.all():
            value = tensor[~finite][0].item()
            raise CheckpointError(
                f"{self.file.path}: {self.name} has {value}: the file is damaged, or the model had diverged"
            )
        return tensor

    def equals(self, other: _Place) -> bool:
        """Whether two tensors have the same shape, dtype and values."""
        if self.entry != other.entry:
            return False
        own = self.file.mapped(self.name)
        theirs = other.file.mapped(other.name)
        return torch.equal(own, theirs)


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
        shard: the most bytes of a file, unless a single tensor is larger. The tensors of one file are in memory.
        say: called with a line for people.

    Raises:
        CheckpointError: the model is not one that is written for `transformers`, such as a Llama whose router has
            sigmoids; no model has its sizes; or the folder exists.
        RecordError: the folder cannot be written.
    """
    own_names = weights.definition.names
    # Only language models have weights of this kind, and all of them have names there.
    assert own_names is not None
    sizes = config_of(weights)
    written = own_names.write(sizes)
    elements: Counter[torch.dtype] = Counter()
    # The names of the tensors in each file, in order.
    groups: list[list[str]] = [[]]
    total = 0
    room = shard
    for name, own in weights.entries.items():
        entry = TensorEntry(own.shape, dtype or own.dtype)
        elements[entry.dtype] += entry.elements
        total += entry.bytes
        if entry.bytes > room and groups[-1]:
            groups.append([])
            room = shard
        groups[-1].append(name)
        room -= entry.bytes
    # transformers loads all tensors in one dtype: the most frequent one.
    most_frequent = elements.most_common(1)[0][0]
    described = _described(weights, written, most_frequent, own_names.longest)
    if weights.metadata.tokenizer is not None and described.tokenizer is None:
        say("the tokenizer is bytes or characters, which transformers has no file for: it is left out")
    # Tensor → name of its file.
    weight_map: dict[str, str] = {}
    with new_folder(folder) as partial:
        for file_number, names in enumerate(groups, start=1):
            file_name = ONE_FILE
            if len(groups) > 1:
                file_name = f"model-{file_number:05}-of-{len(groups):05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for name in names:
                full = weights.read_full(name)
                tensors |= theirs(own_names, name, full.to(dtype or full.dtype), sizes.head_dim)
            weight_map |= dict.fromkeys(tensors, file_name)
            save_file(tensors, partial / file_name, metadata={"format": "pt"})
        if len(groups) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=2))
        described.write_files(partial)
        if described.chat is not None and described.chat.template:
            (partial / TEMPLATE).write_text(described.chat.template, encoding="utf-8")


def _described(weights: Weights, written: Mapping[str, Any], dtype: torch.dtype, longest: str) -> ModelMetadata:
    """What an export says of its model: what the folder of its weights said, except for what training has changed.

    Args:
        written: what a config.json says of the sizes, by `HuggingFaceNames.write`.
        dtype: the dtype that `transformers` loads the tensors in.
        longest: the key with the length of the longest sequence.

    Returns:
        The tokenizer, the descriptions and the chat format to write.
    """
    metadata = weights.metadata
    descriptions = {name: {**content} for name, content in metadata.descriptions.items()}
    # Drawn weights come from no folder.
    drawn = {**written, "bos_token_id": None, "eos_token_id": None}
    if "rope_scaling" in weights.sizes:
        drawn["rope_scaling"] = weights.sizes["rope_scaling"]
    if metadata.bos:
        drawn["bos_token_id"] = metadata.bos[0]
    config = descriptions.setdefault(CONFIG, drawn)
    # A config.json may say that two matrices are tied that are not.
    config["tie_word_embeddings"] = written["tie_word_embeddings"]
    config[longest] = written.get(longest) or metadata.block or 2048
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
    check_new(folder)
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        os.rename(partial, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_write(folder, OSError(*error.args)) from None


def known_model(config: Mapping[str, Any], where: object) -> tuple[ModelDef, HuggingFaceNames, dict[str, Any]]:
    """The model that a config.json describes, what Hugging Face calls its tensors, and the config.json with the keys
    that it lacks.

    Args:
        where: the file, for messages.

    Raises:
        CheckpointError: the model is not known.
    """
    model_type = config.get("model_type")
    definition = of_model_type(model_type)
    if definition is None or definition.names is None:
        known = ", ".join(model_types())
        raise CheckpointError(f"{where}: model_type is {short(model_type)}; those that are known are {known}")
    return definition, definition.names, {**definition.names.defaults[config["model_type"]], **config}


def theirs(
    names: HuggingFaceNames,
    name: str,
    full: Tensor,
    head_dim: int,
) -> dict[str, Tensor]:
    """A tensor as Hugging Face's files have it, by its name there: one, or one for each expert.

    Args:
        name: its name in this package.
        full: the tensor in full.
    """
    if names.is_rotated(name):
        full = to_halves(full, head_dim)
    elif name.endswith(names.fused):
        full = by_kind(full, head_dim)
    other_name = names.there(name)
    if other_name.endswith(names.transposed):
        full = full.t()
    full = full.contiguous()
    if "#" not in other_name:
        return {other_name: full}
    return {other_name.replace("#", str(expert)): matrix for expert, matrix in enumerate(full)}


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


def by_head(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of all queries, keys and values from the order of Hugging Face's files to this package's.

    Args:
        rows: (3 · heads · head_dim, …).
    """
    # (3, heads, head_dim, …) → (heads, 3, head_dim, …)
    kinds = rows.unflatten(0, (3, -1, head_dim))
    return kinds.transpose(0, 1).flatten(0, 2)


def by_kind(rows: Tensor, head_dim: int) -> Tensor:
    """The reverse of `by_head`."""
    # (heads, 3, head_dim, …) → (3, heads, head_dim, …)
    heads = rows.unflatten(0, (-1, 3, head_dim))
    return heads.transpose(0, 1).flatten(0, 2)
