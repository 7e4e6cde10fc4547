"""Files of weights and what lies beside them: Hugging Face's folders, own checkpoints, tokenizers, state dicts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fuzz_files.kinds import Kind, is_small_file
from mmm.checkpoint.manifest import MANIFEST
from mmm.data.text.tokenizer import load_tokenizer, train_bpe
from mmm.generate import tokenizer_on_disk
from mmm.nn.init import full_box
from mmm.parallel.state_dict import loaded_values
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from mmm.weights.weights import config_of
from mmm_lab.cli import export
from mmm_lab.planner.named_model import read_model
from support.llamas import CONFIG, begin_with, byte_bpe, sentencepiece_model, write_hugging_face, write_safetensors

# A model whose files are a few kilobytes.
SMALL = {**CONFIG, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 8, "vocab_size": 300, "eos_token_id": 1}  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog.\nAnd again, the lazy dog.\n" * 4
Reader = Callable[[Path], Any]


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


def exported(name: str) -> Reader:
    """Writes the files of `mmm export`, and says what mmm says of the model."""

    def read(folder: Path) -> Any:
        export.main([str(folder / name), "-o", str(folder / "out")])
        weights = open_weights(folder / name)
        print(config_of(weights), tokenizer_on_disk(weights.metadata), *weights.metadata.notes)
        return weights

    return read


# --- checkpoints of mmm --------------------------------------------------------------------------------------------


def make_own(folder: Path) -> None:
    make_folder(folder)
    write_own(open_weights(folder / "hf"), folder / "own")
    shutil.rmtree(folder / "hf")


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
        # So broken that no sum would help.
        pass


_HF = ("hf/config.json",)
# Every kind of file that weights come in: how it is made, and how it is read.
KINDS = (
    Kind("safetensors", make_folder, ("hf/*.safetensors",), exported("hf"), sparse=True),
    Kind("safetensors-index", make_parts, ("hf/*.index.json", "hf/*.safetensors"), exported("hf"), sparse=True),
    Kind("hf-config", make_folder, _HF, exported("hf"), sparse=True),
    Kind("hf-generation-config", make_folder, ("hf/generation_config.json",), exported("hf")),
    Kind(
        "hf-tokenizer-config", make_folder, ("hf/tokenizer_config.json", "hf/special_tokens_map.json"), exported("hf")
    ),
    Kind("hf-tokenizer", make_folder, ("hf/tokenizer.json",), exported("hf"), sparse=True),
    Kind("checkpoint-manifest", make_own, ("own/*.json",), exported("own"), sparse=True),
    Kind("checkpoint-manifest-resealed", make_own, ("own/checkpoint.json",), exported("own"), seal=seal),
    Kind("checkpoint-metadata", make_own, ("own/.metadata",), exported("own"), seal=seal, sparse=True),
    Kind("checkpoint-data", make_own, ("own/*.distcp",), exported("own"), seal=seal, sparse=True),
)


def make_tokenizer(folder: Path) -> None:
    (folder / "text").write_text(TEXT)
    (folder / "tokenizer.json").write_bytes(train_bpe(iter([TEXT]), 270, "<|endoftext|>"))
    (folder / "text").unlink()


def make_chars(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"kind": "chars", "chars": "".join(sorted(set(TEXT)))}))


def make_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(TEXT.splitlines(), vocab_size=40))


def tokenized(name: str) -> Reader:
    def read(folder: Path) -> Any:
        tokenizer = load_tokenizer(folder / name)
        print(tokenizer)
        return tokenizer, tokenizer.decode(tokenizer.encode(TEXT.encode()).tolist())

    return read


def _plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def make_state(folder: Path) -> None:
    torch.manual_seed(0)
    torch.save(_plain().state_dict(), folder / "model.pt")


def make_state_safetensors(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", dict(_plain().state_dict()))


def loaded(name: str) -> Reader:
    def read_all(folder: Path) -> Any:
        model = _plain()
        read = loaded_values(model, folder / name)
        return {name: read(name, full_box(value)) for name, value in model.state_dict().items()}

    return read_all


def make_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SMALL))


def read_plan(folder: Path) -> Any:
    return str(read_model(str(folder / "config.json"), {}, 16))


KINDS += (
    Kind("tokenizer-json", make_tokenizer, ("*.json",), tokenized("tokenizer.json"), sparse=True),
    Kind("tokenizer-chars", make_chars, ("*.json",), tokenized("tokenizer.json"), sparse=True),
    Kind("sentencepiece", make_sentencepiece, ("*.model",), tokenized("tokenizer.model"), sparse=True),
    Kind("state-dict", make_state, ("model.pt",), loaded("model.pt"), sparse=True),
    Kind(
        "state-dict-safetensors", make_state_safetensors, ("*.safetensors",), loaded("model.safetensors"), sparse=True
    ),
    Kind("plan-config", make_config, ("config.json",), read_plan, sparse=True),
)
