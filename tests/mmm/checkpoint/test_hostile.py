"""Checkpoints that somebody has made to do harm: none of it is done, and each is refused in a line."""

import json
import pickle
import resource
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import mmm.trainer.language  # noqa: F401  # so that it is not its import that takes a second
from mmm.checkpoint.manifest import MANIFEST, _digest, file_sum, read_manifest
from mmm.checkpoint.storage import METADATA, read_metadata
from mmm.errors import CheckpointError
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from mmm_lab.cli.main import main
from support.llamas import write_hugging_face

WQ = "model.layers.0.attention.wq.weight"


@pytest.fixture
def own(tmp_path):
    write_own(open_weights(write_hugging_face(tmp_path / "hf")), tmp_path / "own")
    return tmp_path / "own"


def rewrite(folder, identity=(), about=(), files=()):
    """Change a manifest, as who knows its format can."""
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["sha256"]
    fields["identity"].update(identity)
    fields["about"].update(about)
    fields["files"].update(files)
    (folder / MANIFEST).write_text(json.dumps(fields | {"sha256": _digest(fields)}))


def rewrite_metadata(folder, change):
    path = folder / METADATA
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))
    rewrite(folder, files={METADATA: list(file_sum(path))})


@pytest.mark.parametrize(
    "name", ["../../.bashrc", "/etc/passwd", "config.json", "checkpoint.json", ".metadata", 7, ["a"]]
)
def test_a_tokenizers_name_is_no_path(own, tmp_path, capsys, name):
    """It was one to export, and so any file of the user's was replaced."""
    (tmp_path / ".bashrc").write_text("mine")
    if isinstance(name, str) and name.startswith(".."):
        (own / name).parent.mkdir(exist_ok=True)
    rewrite(own, about={"tokenizer": name})
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(own), "-o", str(tmp_path / "a" / "out")]) == 2
    assert "tokenizer.json, tokenizer.model" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / ".bashrc").read_text() == "mine"


HUGE = 10**9


@pytest.mark.parametrize(
    "identity",
    [
        {"n_layers": HUGE},
        {"n_layers": "2"},
        {"n_layers": True},
        {"n_layers": None},
        {"n_layers": [2]},
        {"n_layers": 2.0},
        {"n_experts": HUGE},
        {"n_experts": -1},
        {"dim": HUGE},
        {"dim": 2**63},
        {"vocab_size": HUGE},
        {"ffn_dim": HUGE},
        {"n_heads": 0},
        {"n_kv_heads": HUGE},
        {"norm_eps": -1.0},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": ["linear"]}},
        {"rope_scaling": {"factor": 2.0}},
        {"tie_word_embeddings": 1},
        {"tie_word_embeddings": True},
        {"program": ["lm"]},
    ],
    ids=str,
)
def test_sizes_are_those_of_the_tensors(own, tmp_path, capsys, identity):
    rewrite(own, identity=identity)
    began = time.process_time()
    assert main(["export", str(own), "-o", str(tmp_path / "out")]) == 2
    assert time.process_time() - began < 5
    err = capsys.readouterr().err
    assert err.startswith("mmm: error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def halve(index):
    entry = index.state_dict_metadata[WQ]
    (chunk,) = entry.chunks
    entry.chunks[0] = replace(chunk, sizes=torch.Size((16, 32)))


def elsewhere(index):
    for place in index.storage_data.values():
        place.relative_path = "../../secret"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (halve, f"the chunks of {WQ} do not cover it"),
        (elsewhere, "it names the file ../../secret, which does not belong to the checkpoint"),
    ],
)
def test_chunks_are_the_tensor(own, tmp_path, capsys, change, message):
    """A tensor whose chunks do not cover it was exported with what the memory held."""
    rewrite_metadata(own, change)
    assert main(["export", str(own), "-o", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_number_costs_no_memory(own, tmp_path):
    rewrite(own, identity={"n_layers": HUGE})

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))

    command = [sys.executable, "-m", "mmm_lab.cli.main", "export", str(own), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


@pytest.mark.parametrize("code", [b"r\xff\xff\xff\x0f", b"p268435455\n"], ids=["LONG_BINPUT", "PUT"])
def test_a_pickle_asks_for_no_more_memory_than_it_fills(own, code):
    """A place far out in the memo would be a list of that length, of gigabytes."""
    path = own / METADATA
    content = path.read_bytes()
    path.write_bytes(content[:-1] + code + content[-1:])
    with pytest.raises(CheckpointError, match="268435455"):
        read_metadata(own, read_manifest(own).files)
