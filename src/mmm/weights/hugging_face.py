"""Folders as `transformers` writes and reads them: config.json, safetensors in one file or several with an index."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
        config = _json(path / CONFIG)
        self.sizes, passed_over = llama_keys.sizes_of(config, path / CONFIG)
        self._notes = llama_keys.note_of(passed_over)
        there: dict[str, _Place] = {}
        for file in self._files():
            for name in file.entries:
                if name in there:
                    files = f"{there[name].file.path.name} and in {file.path.name}"
                    raise CheckpointError(
                        f"{path}: the tensor {printable(name)} is in {files}: remove the file that is wrong"
                    )
                there[name] = _Place(file, name)
        if self.sizes["tie_word_embeddings"] and HEAD in there:
            self._tie(there)
        entries = {name: place.entry for name, place in there.items()}
        self.entries = llama.check_entries(entries, self.sizes, path)
        self._places = {name: there[llama.hf_name(name)] for name in self.entries}
        self.metadata = self._metadata(config)

    def _metadata(self, config: dict[str, Any]) -> ModelMetadata:
        generation = _json(self.path / GENERATION, {})
        eos = llama_keys.tokens_of(generation, "eos_token_id", self.path / GENERATION)  # before those of config.json
        eos = eos or llama_keys.tokens_of(config, "eos_token_id", self.path / CONFIG)
        path = next((self.path / name for name in TOKENIZERS if (self.path / name).exists()), None)
        tokenizer = None
        if path is not None:
            tokenizer = path.name, read_tokenizer(path)
            refuse_pointer(path, tokenizer[1])
        bos: tuple[int, ...] = ()
        chat = None
        if tokenizer is not None:
            bos, note = first_tokens(tokenizer, self.path)
            self._notes += [note] if note else []
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
            names = _json(self.path / INDEX).get("weight_map")
            if not isinstance(names, dict) or not all(map(is_plain_name, names.values())):
                raise CheckpointError(f"{self.path / INDEX} has no weight_map of tensors to names of files beside it")
            paths = [self.path / name for name in sorted(set(names.values()))]
        else:
            paths = sorted(self.path.glob("*.safetensors"))
        if missing := [path for path in paths if not path.exists()]:
            raise CheckpointError(f"{missing[0]} is missing")
        return [safetensors.SafetensorsFile(path) for path in paths]

    def _tie(self, there: dict[str, _Place]) -> None:
        """What ``tie_word_embeddings`` means where the files have an output matrix, as `transformers` has it: equal to
        the embedding, it is the embedding; the only one of the two is both; else they are not tied."""
        if EMBEDDING not in there:
            there[EMBEDDING] = there.pop(HEAD)
        elif there[EMBEDDING].equals(there[HEAD]):
            del there[HEAD]
        else:
            self.sizes["tie_word_embeddings"] = False
            self._notes.append(f"tie_word_embeddings is true, but {HEAD} is not {EMBEDDING}: the two are not tied")

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        place = self._places[name]
        if not llama.is_rotated(name) or not length[0]:
            return place.read_finite(start, length)
        head = self.sizes["dim"] // self.sizes["n_heads"]
        first, last = start[0] // head * head, -(-(start[0] + length[0]) // head) * head  # full heads
        rows = llama.to_pairs(place.read_finite((first, *start[1:]), (last - first, *length[1:])), head)
        return rows[start[0] - first : start[0] - first + length[0]].contiguous()


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
            place = [first + offset for first, offset in zip(start, index, strict=True)]
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
    elements: Counter[torch.dtype] = Counter()
    for name in shapes_of(weights.sizes):
        entry = weights.entries[name]
        elements[dtype or entry.dtype] += entry.elements
    kind = str(elements.most_common(1)[0][0])  # transformers loads all tensors in it
    metadata = weights.metadata
    config = llama_keys.config_of(weights.sizes, metadata, kind.removeprefix("torch."))
    head_dim = config["head_dim"]
    if folder.exists():
        raise CheckpointError(f"{folder} is there already: give another folder, or remove it")
    entries: dict[str, TensorEntry] = {}
    of: dict[str, str] = {}  # by the name there, the name here
    for name in shapes_of(weights.sizes):
        other, entry = llama.hf_name(name), weights.entries[name]
        entries[other], of[other] = TensorEntry(entry.shape, dtype or entry.dtype), name
    files = _shards(entries, shard)
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)

    def slabs(names: Sequence[str]) -> Iterator[Tensor]:
        for other in names:
            for start, length in _head_slabs(
                weights.entries[of[other]], head_dim if llama.is_rotated(of[other]) else 1
            ):
                rows = weights.read(of[other], start, length).to(entries[other].dtype)
                yield llama.to_halves(rows, head_dim) if llama.is_rotated(of[other]) else rows

    try:
        partial.mkdir(parents=True)
        for file_name, names in files.items():
            with open(partial / file_name, "wb") as file:
                file.write(safetensors.header_of({name: entries[name] for name in names}))
                safetensors.write(file, slabs(names))
                file.flush()
                os.fsync(file.fileno())
        if len(files) > 1:
            weight_map = {name: file_name for file_name, names in files.items() for name in names}
            total = sum(entry.bytes for entry in entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=2))
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        tokenizer = metadata.tokenizer
        if tokenizer is not None and tokenizer[0] and not tokenizer[1].startswith(b'{"kind": "chars"'):
            (partial / tokenizer[0]).write_bytes(tokenizer[1])
            _write_tokenizer_config(partial, metadata)
        elif tokenizer is not None:
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


def _head_slabs(entry: TensorEntry, rows: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """`TensorEntry.slabs`, each of a multiple of `rows` rows."""
    for start, length in TensorEntry((entry.shape[0] // rows, rows, *entry.shape[1:]), entry.dtype).slabs():
        yield (start[0] * rows, *start[2:]), (length[0] * rows, *length[2:])


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


def _json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a file says.

    Args:
        missing: what stands for a file that is not there; without it that is an error.
    """
    if missing is not None and not path.exists():
        return missing
    return read_json(path, CheckpointError)
