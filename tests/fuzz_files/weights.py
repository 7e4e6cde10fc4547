"""Files of weights and what lies beside them: Hugging Face's folders, own checkpoints."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from fuzz_files import formats, mutate
from fuzz_files.kinds import Kind, is_small_file
from mmm.checkpoint.manifest import MANIFEST
from mmm.checkpoint.storage import METADATA, read_metadata
from mmm.cli import export
from mmm.generate import config_of, tokenizer_on_disk
from mmm.weights.open_weights import open_weights
from mmm.weights.own import OwnWeights, write_own
from mmm.weights.weights import slices
from support.llamas import CONFIG, begin_with, byte_bpe, write_hugging_face

SMALL = {**CONFIG, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 8, "vocab_size": 300, "eos_token_id": 1}  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog.\nAnd again, the lazy dog.\n" * 4
DATA = "__0_0.distcp"


# --- Hugging Face's folders ----------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    write_hugging_face(folder / "hf", SMALL)
    (folder / "hf" / "tokenizer.json").write_bytes(byte_bpe(("<s>", "</s>"), begin_with("<s>")))
    (folder / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "bos_token_id": 0}))
    about = {"add_bos_token": True, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "hf" / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))


def make_parts(folder: Path) -> None:
    make_folder(folder)
    shutil.rmtree(folder / "hf")
    write_hugging_face(folder / "hf", SMALL, files=2)


def read_folder(folder: Path) -> Any:
    return _exported(folder / "hf", folder)


def _exported(source: Path, folder: Path) -> Any:
    """The files of `mmm export`, and what mmm says of the model."""
    export.main([str(source), str(folder / "out")])
    weights = open_weights(source)
    print(config_of(weights), tokenizer_on_disk(weights.metadata), *weights.metadata.notes)
    return weights


def wrong_folder(folder: Path, found: Any) -> str | None:
    """Whether a strict reader takes the same files, and finds the values that the export has."""
    there: dict[str, Any] = {}
    files = [folder / "hf" / "model.safetensors"]
    files = files if files[0].exists() else sorted({folder / "hf" / name for name in _index(folder)})
    try:
        for file in files:
            there |= formats.safetensors(file.read_bytes())
    except formats.BadFormat as error:
        return f"accepted safetensors: {error}"
    made = formats.safetensors((folder / "out" / "model.safetensors").read_bytes())
    for name, (_, shape, content) in made.items():
        given = there.get(name, there.get("model.embed_tokens.weight"))
        if given[1:] != (shape, content):
            return f"{name} is exported with other values"
    return None


def _index(folder: Path) -> set[str]:
    return set(json.loads((folder / "hf" / "model.safetensors.index.json").read_text())["weight_map"].values())


_made: list[bytes] = []  # metadata, as it was written here


# --- checkpoints of mmm --------------------------------------------------------------------------------------------


def make_own(folder: Path) -> None:
    make_folder(folder)
    write_own(open_weights(folder / "hf"), folder / "own")
    shutil.rmtree(folder / "hf")
    _made.append((folder / "own" / METADATA).read_bytes())


def read_own(folder: Path) -> Any:
    return _exported(folder / "own", folder)


def wrong_own(folder: Path, found: OwnWeights) -> str | None:
    own = folder / "own"
    manifest = json.loads((own / MANIFEST).read_bytes())
    if manifest["sha256"] != _digest(manifest):
        return "accepted a manifest with another sum"
    for name, (size, sha256) in manifest["files"].items():
        if "/" in name or (own / name).is_symlink() or not (own / name).is_file():
            return f"accepted a manifest's file that is none in the folder: {name!r}"
        content = (own / name).read_bytes()
        if (len(content), hashlib.sha256(content).hexdigest()) != (size, sha256):
            return "accepted a file with another sum"
    name = manifest["about"].get("tokenizer")
    if name and name not in manifest["files"]:
        return f"the tokenizer is no file of the manifest: {name!r}"
    return _uncovered(own, found)


def _uncovered(own: Path, found: OwnWeights) -> str | None:
    """Whether the chunks of each tensor cover it, and are inside of it."""
    kept = read_metadata(own, found.manifest.files)
    for name, entry in kept.state_dict_metadata.items():
        seen = np.zeros(tuple(entry.size), np.int8)
        for chunk in entry.chunks:
            ends = [begin + length for begin, length in zip(chunk.offsets, chunk.sizes, strict=True)]
            if min((*chunk.offsets, *chunk.sizes), default=0) < 0 or any(a > b for a, b in zip(ends, seen.shape)):  # noqa: B905
                return "a chunk is outside of its tensor"
            seen[slices(chunk.offsets, chunk.sizes)] += 1
        if not (seen > 0).all():
            return f"chunks do not cover a tensor: {name}"
    return None


def _digest(manifest: dict[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def seal(folder: Path) -> None:
    """Sums as they would be if mmm had written these files."""
    own = folder / "own"
    if not is_small_file(own / MANIFEST):
        return
    try:
        manifest = json.loads((own / MANIFEST).read_bytes())
        for name, entry in manifest["files"].items():
            if is_small_file(own / name):
                content = (own / name).read_bytes()
                entry[:] = len(content), hashlib.sha256(content).hexdigest()
        (own / MANIFEST).write_text(json.dumps(manifest | {"sha256": _digest(manifest)}))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass  # so broken that no sum would help


def own_metadata(name: str, content: bytes, random: Random) -> tuple[bytes, str] | None:
    """Metadata of DCP that says something else of its tensors."""
    if content not in _made:  # what has been changed is not unpickled here
        return None
    found = pickle.loads(content)
    name, numbers = random.choice(sorted(found.state_dict_metadata)), (0, 1, -1, 7, 10**9, 2**31, 2**62)
    entry, chosen = found.state_dict_metadata[name], random.choice(numbers)
    index = next(index for index in found.storage_data if index.fqn == name)
    place = found.storage_data[index]
    match random.choice(
        ("no chunks", "offsets", "sizes", "size", "place", "length", "file", "dtype", "twice", "name", "no place")
    ):
        case "no chunks":
            entry.chunks.clear()
        case "offsets":
            entry.chunks[0] = replace(entry.chunks[0], offsets=torch.Size([chosen] * len(entry.size)))
        case "sizes":
            entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size([chosen, *entry.size[1:]]))
        case "size":
            found.state_dict_metadata[name] = replace(entry, size=torch.Size([chosen, *entry.size[1:]]))
        case "place":
            found.storage_data[index] = replace(place, offset=chosen)
        case "length":
            found.storage_data[index] = replace(place, length=chosen)
        case "file":
            found.storage_data[index] = replace(place, relative_path=random.choice(mutate.ODD))
        case "dtype":
            properties = replace(entry.properties, dtype=random.choice((torch.int8, torch.complex128, torch.float64)))
            found.state_dict_metadata[name] = replace(entry, properties=properties)
        case "twice":
            entry.chunks.append(entry.chunks[0])
        case "name":
            found.planner_data[name] = random.choice(
                (("model",), (1, 2), "model", ("model", 3), (), ("optimizer", name))
            )
        case "no place":
            del found.storage_data[index]
    return pickle.dumps(found), f"{name}: other metadata"


def own_data(name: str, content: bytes, random: Random) -> tuple[bytes, str] | None:
    """What is no tensor, or one of another shape, in a tensor's place."""
    other = random.choice(
        (torch.zeros(3), torch.zeros(8, 8, dtype=torch.int64), [1, 2], {"a": torch.zeros(1)}, _Harm())
    )
    stream = io.BytesIO()
    torch.save(other, stream)
    made = stream.getvalue()
    return made + content[len(made) :], f"begins with {type(other).__name__}"


class _Harm:
    """Whose unpickling starts a program."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("true",)


_HF = ("hf/config.json",)
KINDS = (
    Kind("safetensors", make_folder, ("hf/*.safetensors",), read_folder, wrong_folder, sparse=True),
    Kind("safetensors-index", make_parts, ("hf/*.index.json", "hf/*.safetensors"), read_folder, sparse=True),
    Kind("hf-config", make_folder, _HF, read_folder, wrong_folder, sparse=True),
    Kind("hf-generation-config", make_folder, ("hf/generation_config.json",), read_folder, wrong_folder),
    Kind("hf-tokenizer-config", make_folder, ("hf/tokenizer_config.json", "hf/special_tokens_map.json"), read_folder),
    Kind("hf-tokenizer", make_folder, ("hf/tokenizer.json",), read_folder, wrong_folder, sparse=True),
    Kind("checkpoint-manifest", make_own, ("own/*.json",), read_own, wrong_own, sparse=True),
    Kind("checkpoint-manifest-resealed", make_own, ("own/checkpoint.json",), read_own, wrong_own, seal),
    Kind("checkpoint-metadata", make_own, ("own/.metadata",), read_own, wrong_own, seal, own_metadata, sparse=True),
    Kind("checkpoint-data", make_own, ("own/*.distcp",), read_own, wrong_own, seal, own_data, sparse=True),
)
