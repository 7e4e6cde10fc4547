"""Weights of others that somebody has made to do harm: each file is refused in a line, at once, and costs no memory.
What people give in place of a folder of weights, and weights that are no numbers: said by name, with what to do."""

import json
import math
import struct
import time

import pytest
import torch

import mmm.trainer.language  # noqa: F401
from mmm.errors import CheckpointError
from mmm.weights.hugging_face import export
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from mmm_lab.cli.main import main
from support.llamas import CONFIG, tensors, write_hugging_face

NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
HUGE = 10**9
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def refused(capsys, path, tmp_path, message):
    began = time.process_time()
    assert main(["import", str(path), "-o", str(tmp_path / "out")]) == 2
    assert time.process_time() - began < 5
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert err.strip().isprintable()
    assert not (tmp_path / "out").exists()


DAMAGED = "model.safetensors is not a safetensors file, or is truncated or damaged: "


def rewrite(path, change):
    """Change a safetensors file's header."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[size:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header[HEAD].update(data_offsets=header[EMBEDDING]["data_offsets"]), DAMAGED),
        (lambda header: header[NORM].update(shape=[1 << 61], data_offsets=[0, 1 << 63]), DAMAGED),
        (lambda header: header.pop(HEAD), DAMAGED),
        (lambda header: header.update({"\x1b[2J\n": EMPTY}), "has the unknown tensor \\x1b[2J\\n"),
    ],
    ids=["two in one place", "huge", "a gap", "a name that clears the screen"],
)
def test_tensors_are_the_bytes_after_the_header(tmp_path, capsys, change, message):
    folder = write_hugging_face(tmp_path / "hf")
    rewrite(folder / "model.safetensors", change)
    refused(capsys, folder, tmp_path, message)


@pytest.mark.parametrize("name", ["../hf2/a.safetensors", "/dev/zero", "", "..", 7, None])
def test_an_index_names_files_beside_it(tmp_path, capsys, name):
    folder = write_hugging_face(tmp_path / "hf", files=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][NORM] = name
    index.write_text(json.dumps(content))
    refused(capsys, folder, tmp_path, "has no weight_map of tensors to names of files next to it")


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
@pytest.mark.parametrize("value", [HUGE, 10**200], ids=range(2))
def test_sizes_of_a_config(tmp_path, capsys, key, value):
    refused(capsys, write_hugging_face(tmp_path / "hf", {**CONFIG, key: value}, weights={}), tmp_path, "mmm: error: ")


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [HUGE, -1, 10**200, "7", True], ids=range(5))
def test_sizes_of_a_config_to_plan_with(tmp_path, capsys, key, value):
    (tmp_path / "m.json").write_text(json.dumps({**CONFIG, key: value}))
    began = time.process_time()
    assert main(["plan", "--model", str(tmp_path / "m.json"), "--site", "aurora", "--nhosts", "1"]) == 2
    assert time.process_time() - began < 5
    names = {"num_hidden_layers": "n_layers", "hidden_size": "dim"}  # ours
    error = capsys.readouterr().err
    assert key in error or names[key] in error


def test_more_layers_than_a_plan_takes(tmp_path, capsys):
    (tmp_path / "m.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1_000_000}))
    assert main(["plan", "--model", str(tmp_path / "m.json"), "--site", "aurora", "--nhosts", "1"]) == 2
    assert "1,000,000 layers; up to 1,000 are planned" in capsys.readouterr().err


def test_a_plan_s_file_of_odd_types(tmp_path, capsys):
    odd = {"head_dim": "8", "model_type": ["\x1b[2J"], "rope_scaling": {"rope_type": []}, "rms_norm_eps": "small"}
    (tmp_path / "m.json").write_text(json.dumps({**CONFIG, **odd}))
    assert main(["plan", "--model", str(tmp_path / "m.json"), "--site", "aurora", "--nhosts", "1"]) in (0, 2)
    out = capsys.readouterr()
    assert "\x1b[2J" not in out.out + out.err


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n"
MATRIX = "model.layers.1.mlp.up_proj.weight"


def message(path):
    with pytest.raises(CheckpointError) as caught:
        open_weights(path)
    return str(caught.value)


def test_the_name_of_a_model_on_the_hub(tmp_path):
    assert "Nothing is downloaded: " in message(tmp_path / "Qwen" / "Qwen2.5-0.5B")


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


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs(tmp_path, name):
    folder = write_hugging_face(tmp_path / "hf")
    (folder / name).write_text(POINTER)
    text = message(folder)
    assert f"{name} is a Git LFS pointer" in text
    assert "git lfs pull" in text


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [("_orig_mod.", "_orig_mod"), ("base_model.model.", "merge_and_unload"), ("module.", "rename")],
)
def test_names_with_something_in_front(tmp_path, prefix, hint):
    weights = {prefix + name: tensor for name, tensor in tensors().items()}
    text = message(write_hugging_face(tmp_path / "hf", CONFIG, weights))
    assert f"{prefix}model.embed_tokens.weight" in text
    assert hint in text


def test_what_else_a_folder_has(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf" in message(tmp_path)


@pytest.mark.parametrize("name", [MATRIX, "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers(tmp_path, name, value):
    weights = tensors(dtype=torch.float16)
    weights[name].view(-1)[7] = value
    folder = write_hugging_face(tmp_path / "hf", CONFIG, weights)
    with pytest.raises(CheckpointError, match=rf"{name} has {value}: "):
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
