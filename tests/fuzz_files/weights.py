"""Files of weights and what lies beside them: Hugging Face's folders, own checkpoints."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from fuzz_files.kinds import Kind, is_small_file
from mmm.checkpoint.manifest import MANIFEST
from mmm.generate import config_of, tokenizer_on_disk
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from mmm_lab.cli import export
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


# --- checkpoints of mmm --------------------------------------------------------------------------------------------


def make_own(folder: Path) -> None:
    make_folder(folder)
    write_own(open_weights(folder / "hf"), folder / "own")
    shutil.rmtree(folder / "hf")


def read_own(folder: Path) -> Any:
    return _exported(folder / "own", folder)


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


_HF = ("hf/config.json",)
KINDS = (
    Kind("safetensors", make_folder, ("hf/*.safetensors",), read_folder, sparse=True),
    Kind("safetensors-index", make_parts, ("hf/*.index.json", "hf/*.safetensors"), read_folder, sparse=True),
    Kind("hf-config", make_folder, _HF, read_folder, sparse=True),
    Kind("hf-generation-config", make_folder, ("hf/generation_config.json",), read_folder),
    Kind("hf-tokenizer-config", make_folder, ("hf/tokenizer_config.json", "hf/special_tokens_map.json"), read_folder),
    Kind("hf-tokenizer", make_folder, ("hf/tokenizer.json",), read_folder, sparse=True),
    Kind("checkpoint-manifest", make_own, ("own/*.json",), read_own, sparse=True),
    Kind("checkpoint-manifest-resealed", make_own, ("own/checkpoint.json",), read_own, seal=seal),
    Kind("checkpoint-metadata", make_own, ("own/.metadata",), read_own, seal=seal, sparse=True),
    Kind("checkpoint-data", make_own, ("own/*.distcp",), read_own, seal=seal, sparse=True),
)
