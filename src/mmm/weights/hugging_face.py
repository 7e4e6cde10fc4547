"""Folders as `transformers` writes and reads them: config.json, safetensors in one file or several with an index."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
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
from mmm.outside import is_plain_name, printable, read_json
from mmm.weights import llama, llama_keys
from mmm.weights.weights import Weights, shapes_of

CONFIG, INDEX, ONE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
EMBEDDING = llama.NAMES["tok_embeddings.weight"]
HEAD = llama.NAMES["output.weight"]
GENERATION, SENTENCE_PIECE = "generation_config.json", TOKENIZERS[1]
SHARD = 5_000_000_000  # bytes of a file, of the tensors that fit


class HuggingFace(Weights):
    """A folder's weights.

    Raises:
        CheckpointError: no Llama of this kind (`llama_keys.sizes_of`); a file or a tensor is missing, damaged, or of
            another shape; a tensor is in two files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json(path / CONFIG, CheckpointError)
        self.sizes, passed_over = llama_keys.sizes_of(config, path / CONFIG)
        self._notes = llama_keys.note_of(passed_over)
        places: dict[str, _Place] = {}  # by the name there
        for file in self._files():
            for name in file.entries:
                if name in places:
                    files = f"{places[name].file.path.name} and in {file.path.name}"
                    raise CheckpointError(
                        f"{path}: the tensor {printable(name)} is in {files}: remove the file that is wrong"
                    )
                places[name] = _Place(file, name)
        if self.sizes["tie_word_embeddings"] and HEAD in places:
            self._tie(places)
        entries = {name: place.entry for name, place in places.items()}
        self.entries = llama.check_entries(entries, self.sizes, path)
        self._places = {name: places[llama.hf_name(name)] for name in self.entries}
        self.metadata = self._metadata(config)

    def _metadata(self, config: dict[str, Any]) -> ModelMetadata:
        """What the folder says besides the sizes: its tokenizer, and the tokens that begin and end a text."""
        eos: tuple[int, ...] = ()
        if (self.path / GENERATION).exists():  # it counts before config.json
            generation = read_json(self.path / GENERATION, CheckpointError)
            eos = llama_keys.tokens_of(generation, "eos_token_id", self.path / GENERATION)
        eos = eos or llama_keys.tokens_of(config, "eos_token_id", self.path / CONFIG)
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
        if EMBEDDING not in places:
            places[EMBEDDING] = places.pop(HEAD)
        elif places[EMBEDDING].equals(places[HEAD]):
            del places[HEAD]
        else:
            self.sizes["tie_word_embeddings"] = False
            self._notes.append(f"tie_word_embeddings is true, but {HEAD} is not {EMBEDDING}: the two are not tied")

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        place = self._places[name]
        if not llama.is_rotated(name) or not length[0]:
            return place.read_finite(start, length)
        head = self.sizes["dim"] // self.sizes["n_heads"]
        # The rows of full heads, in which those that are wanted are.
        before = start[0] % head
        rows = -(-(before + length[0]) // head) * head
        heads = place.read_finite((start[0] - before, *start[1:]), (rows, *length[1:]))
        return llama.to_pairs(heads, head)[before : before + length[0]].contiguous()


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
        CheckpointError: a model with experts; the folder is there. RecordError: it cannot be written.
    """
    llama_keys.refuse_experts(weights.sizes)
    if folder.exists():
        raise CheckpointError(f"{folder} is there already: give another folder, or remove it")
    entries: dict[str, TensorEntry] = {}  # by the name there
    names: dict[str, str] = {}  # by the name there, the name here
    elements: Counter[torch.dtype] = Counter()
    for name in shapes_of(weights.sizes):
        own = weights.entries[name]
        entry = TensorEntry(own.shape, dtype or own.dtype)
        entries[llama.hf_name(name)] = entry
        names[llama.hf_name(name)] = name
        elements[entry.dtype] += entry.elements
    metadata = weights.metadata
    kind = str(elements.most_common(1)[0][0]).removeprefix("torch.")  # transformers loads all tensors in it
    config = llama_keys.config_of(weights.sizes, metadata, kind)

    def tensor(other: str) -> Tensor:
        name = names[other]
        shape = entries[other].shape
        full = weights.read(name, [0] * len(shape), shape).to(entries[other].dtype)
        return llama.to_halves(full, config["head_dim"]) if llama.is_rotated(name) else full

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
