"""Weights of others that somebody has made to do harm: each file is refused in a line, at once, and costs no memory."""

import json
import math
import struct
import time

import pytest

import mmm.trainer.language  # noqa: F401
from mmm_lab.cli.main import main
from support.llamas import CONFIG, write_hugging_face

NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
HUGE = 10**9
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def refused(capsys, path, tmp_path, words):
    began = time.process_time()
    assert main(["import", str(path), "-o", str(tmp_path / "out")]) == 2
    assert time.process_time() - began < 1
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert err.strip().isprintable()
    assert not (tmp_path / "out").exists()


DAMAGED = "model.safetensors is no safetensors file, or is truncated or damaged: "


def rewrite(path, change):
    """Change a safetensors file's header."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[size:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: header[HEAD].update(data_offsets=header[EMBEDDING]["data_offsets"]), DAMAGED),
        (lambda header: header[HEAD].update(data_offsets=[at - 4 for at in header[HEAD]["data_offsets"]]), DAMAGED),
        (lambda header: header[NORM].update(shape=["32"]), DAMAGED),
        (lambda header: header[EMBEDDING].update(shape="67"), DAMAGED),
        (lambda header: header[NORM].update(shape=[32.0]), DAMAGED),
        (lambda header: header[EMBEDDING].update(shape=[-67, -32]), DAMAGED),
        (lambda header: header[NORM].update(data_offsets=["0", "128"]), DAMAGED),
        (lambda header: header[NORM]["data_offsets"].append(0), DAMAGED),
        (lambda header: header[NORM].update(shape=[1 << 61], data_offsets=[0, 1 << 63]), DAMAGED),
        (lambda header: header.update({NORM: [1]}), DAMAGED),
        (lambda header: header[NORM].update(dtype=["F32"]), DAMAGED),
        (lambda header: header.pop(HEAD), DAMAGED),  # a gap
        (lambda header: header[NORM].update(scale=math.nan), DAMAGED),
        (lambda header: header.update({"\x1b[2J\n": EMPTY}), "has the unknown tensor \\x1b[2J\\n"),
    ],
)
def test_tensors_are_the_bytes_after_the_header(tmp_path, capsys, change, words):
    folder = write_hugging_face(tmp_path / "hf")
    rewrite(folder / "model.safetensors", change)
    refused(capsys, folder, tmp_path, words)


@pytest.mark.parametrize("name", ["../hf2/a.safetensors", "/dev/zero", "", "..", 7, None])
def test_an_index_names_files_beside_it(tmp_path, capsys, name):
    folder = write_hugging_face(tmp_path / "hf", files=2)
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"][NORM] = name
    index.write_text(json.dumps(found))
    refused(capsys, folder, tmp_path, "has no weight_map of tensors to names of files beside it")


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
@pytest.mark.parametrize("value", [HUGE, 10**200], ids=range(2))
def test_sizes_of_a_config(tmp_path, capsys, key, value):
    refused(capsys, write_hugging_face(tmp_path / "hf", {**CONFIG, key: value}, weights={}), tmp_path, "mmm: error: ")


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [HUGE, -1, 10**200, "7", [7], True, 2.5], ids=range(7))
def test_sizes_of_a_config_to_plan_with(tmp_path, capsys, key, value):
    (tmp_path / "m.json").write_text(json.dumps({**CONFIG, key: value}))
    began = time.process_time()
    assert main(["plan", "--model", str(tmp_path / "m.json"), "--site", "aurora", "--hosts", "1"]) == 2
    assert time.process_time() - began < 1
    names = {"num_hidden_layers": "n_layers", "hidden_size": "dim"}  # ours
    error = capsys.readouterr().err
    assert key in error or names[key] in error


def test_more_layers_than_a_plan_takes(tmp_path, capsys):
    (tmp_path / "m.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1_000_000}))
    assert main(["plan", "--model", str(tmp_path / "m.json"), "--site", "aurora", "--hosts", "1"]) == 2
    assert "1,000,000 layers; up to 1,000 are planned" in capsys.readouterr().err


def test_a_plan_s_file_of_odd_types(tmp_path, capsys):
    odd = {"head_dim": "8", "model_type": ["\x1b[2J"], "rope_scaling": {"rope_type": []}, "rms_norm_eps": "small"}
    (tmp_path / "m.json").write_text(json.dumps({**CONFIG, **odd}))
    assert main(["plan", "--model", str(tmp_path / "m.json"), "--site", "aurora", "--hosts", "1"]) in (0, 2)
    out = capsys.readouterr()
    assert "\x1b[2J" not in out.out + out.err
