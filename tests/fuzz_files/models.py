"""Tokenizers, state dicts, and the config.json of a model that is planned for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fuzz_files.kinds import Kind
from fuzz_files.weights import SMALL, TEXT
from mmm.data.text.tokenizer import load_tokenizer, train_bpe
from mmm.nn.draw import full_box
from mmm.parallel.state_dict import loaded_values
from mmm_lab.planner.named_model import read_model
from support.llamas import sentencepiece_model, write_safetensors


def make_tokenizer(folder: Path) -> None:
    (folder / "text").write_text(TEXT)
    (folder / "tokenizer.json").write_bytes(train_bpe(iter([TEXT]), 270, "<|endoftext|>"))
    (folder / "text").unlink()


def make_chars(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"kind": "chars", "chars": "".join(sorted(set(TEXT)))}))


def make_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(TEXT.splitlines(), vocab_size=40))


def read_json(folder: Path) -> Any:
    return _read(folder / "tokenizer.json")


def read_sentencepiece(folder: Path) -> Any:
    return _read(folder / "tokenizer.model")


def _read(path: Path) -> Any:
    tokenizer = load_tokenizer(path)
    print(tokenizer)
    return tokenizer, tokenizer.decode(tokenizer.encode(TEXT.encode()).tolist())


def _plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def make_state(folder: Path) -> None:
    torch.manual_seed(0)
    torch.save(_plain().state_dict(), folder / "model.pt")


def make_state_safetensors(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", dict(_plain().state_dict()))


def read_state(folder: Path) -> Any:
    return _loaded(folder / "model.pt")


def read_safetensors(folder: Path) -> Any:
    return _loaded(folder / "model.safetensors")


def _loaded(path: Path) -> Any:
    model = _plain()
    read = loaded_values(model, path)
    return {name: read(name, full_box(value)) for name, value in model.state_dict().items()}


def make_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SMALL))


def read_plan(folder: Path) -> Any:
    return str(read_model(str(folder / "config.json"), {}, 16))


KINDS = (
    Kind("tokenizer-json", make_tokenizer, ("*.json",), read_json, sparse=True),
    Kind("tokenizer-chars", make_chars, ("*.json",), read_json, sparse=True),
    Kind("sentencepiece", make_sentencepiece, ("*.model",), read_sentencepiece, sparse=True),
    Kind("state-dict", make_state, ("model.pt",), read_state, sparse=True),
    Kind("state-dict-safetensors", make_state_safetensors, ("*.safetensors",), read_safetensors, sparse=True),
    Kind("plan-config", make_config, ("config.json",), read_plan, sparse=True),
)
