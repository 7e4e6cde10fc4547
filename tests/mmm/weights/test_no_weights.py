"""What people give in place of a folder of weights, and weights that are no numbers: said by name, with what to do."""

import json
import math

import pytest
import torch

from mmm.errors import CheckpointError
from mmm.weights.hugging_face import export
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from support.llamas import CONFIG, tensors, write_hugging_face

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n"
MATRIX = "model.layers.1.mlp.up_proj.weight"


def message(path):
    with pytest.raises(CheckpointError) as caught:
        open_weights(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "gpt2"])
def test_the_name_of_a_model_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert "nothing is downloaded: give a folder" in message(tmp_path.joinpath(name).relative_to(tmp_path))
    assert "downloaded" not in message(tmp_path / name)


def test_pickles(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({}, tmp_path / "pytorch_model.bin")
    text = message(tmp_path)
    assert "pytorch_model.bin" in text
    assert "save_pretrained" in text


@pytest.mark.parametrize("config", [False, True])
def test_an_adapter(tmp_path, config):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    if config:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    text = message(tmp_path)
    assert "adapter of the model org/base" in text
    assert "merge_and_unload" in text


def test_the_top_of_a_hub_s_cache(tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0a1b"
    snapshot.parent.mkdir(parents=True)
    write_hugging_face(snapshot)
    assert str(snapshot) in message(tmp_path / "models--org--name")
    assert str(snapshot) in message(tmp_path)
    assert open_weights(snapshot).entries


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs(tmp_path, name):
    folder = write_hugging_face(tmp_path / "hf")
    (folder / name).write_text(POINTER)
    text = message(folder)
    assert f"{name} is a Git LFS pointer" in text
    assert "git lfs pull" in text


@pytest.mark.parametrize(
    ("prefix", "words"),
    [("_orig_mod.", "_orig_mod"), ("base_model.model.", "merge_and_unload"), ("module.", "rename")],
)
def test_names_with_something_in_front(tmp_path, prefix, words):
    weights = {prefix + name: tensor for name, tensor in tensors().items()}
    text = message(write_hugging_face(tmp_path / "hf", CONFIG, weights))
    assert f"{prefix}model.embed_tokens.weight" in text
    assert words in text


def test_what_else_a_folder_has(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf" in message(tmp_path)


@pytest.mark.parametrize("name", [MATRIX, "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers(tmp_path, name, value):
    weights = tensors(dtype=torch.float16)
    weights[name].view(-1)[7] = value
    folder = write_hugging_face(tmp_path / "hf", CONFIG, weights)
    with pytest.raises(CheckpointError, match=rf"{name} is {value} at \[.*7\]"):
        write_own(open_weights(folder), tmp_path / "own")
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("wide", ["norms", "head"])
def test_the_dtype_of_a_config_is_that_of_most_elements(tmp_path, wide):
    weights = tensors(dtype=torch.bfloat16)
    for name, tensor in weights.items():
        if (tensor.ndim == 1) if wide == "norms" else (name == "lm_head.weight"):
            weights[name] = tensor.float()
    folder = write_hugging_face(tmp_path / "hf", CONFIG, weights)
    export(open_weights(folder), tmp_path / "out", None, 10**9, print)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
