"""Four axes at once, as a user runs them: each model, its losses those of one rank, and what is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmm.history
from mmm.examples import parallel_4d
from mmm.trainer.flags import run_main

LAUNCH = str(Path(sys.executable).parent / "launch")
SMALL = {"max_iters": 4, "global_batch_size": 8, "dtype": "fp64", "optimizer": "sgd", "lr": 0.3}


def small(model):
    return SMALL | ({"seq_length": 32} if model == "transformer" else {})


@pytest.mark.parametrize(
    ("model", "ranks", "flags", "layout"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("transformer", 4, "", "pp2·tp2"),
                ("vit", 4, "--pp 2 --schedule GPipe", "pp2·dp2"),
                ("cnn", 4, "--microbatches 4", "pp2·tp2"),
                ("cnn", 4, "--dp_replicate 2 --tp 2 --microbatches 3", "dp_replicate2·tp2"),
                ("transformer", 4, "--pp 2 --cp 2 --schedule ZBVZeroBubble --microbatches 4", "pp2·cp2"),
                ("transformer", 8, "--pp 2 --cp 2 --tp 2", "pp2·cp2·tp2"),
                ("transformer", 4, "--n_experts 4 --ep 2 --tp 2", "dp2·tp2·ep2"),
            ]
        ),
    ],
)
def test_losses_of_one_rank(tmp_path, monkeypatch, model, ranks, flags, layout):
    command = [LAUNCH, "-n", str(ranks), "--device", "cpu", "python3", "-m", "mmm.examples.parallel_4d", "--model"]
    command += [model, *(word for name, value in small(model).items() for word in (f"--{name}", str(value)))]
    command += ["--no-plots", "--outdir", str(tmp_path / "many"), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((tmp_path / "many/config.json").read_text())
    assert config["layout"] == layout
    assert (f"layout {layout} chosen for 4 ranks" in done.stdout) == (not flags or flags.startswith("--micro"))
    monkeypatch.setattr("mmm.history.plot_all", lambda *_: [])
    experts = 4 if "experts" in flags else None
    parallel_4d.train(parallel_4d.Config(**small(model), model=model, n_experts=experts, outdir=tmp_path / "one"))
    one, many = (mmm.history.load(tmp_path / name) for name in ("one", "many"))
    for name in ("loss", "val_loss" if model == "transformer" else "test_loss"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-9)
    parts = [many[part].values for part in ("dtd", "dtf", "dtb", "dto", *(["dtw"] if "pp" in layout else []))]
    np.testing.assert_allclose(sum(parts), many.dt, rtol=1e-12)
    # Every rank holds about its part; what is replicated over tp (norms, convolutions) makes the sum a little more.
    assert 1 <= sum(config["held"]) / config["parameters"] < (2.2 if config["mesh"]["dp_replicate"] == 2 else 1.2)


@pytest.mark.parametrize(
    ("ranks", "model", "layout"),
    [
        (1, "transformer", "1"),
        (2, "transformer", "pp2"),
        (3, "cnn", "dp3"),
        (4, "vit", "pp2·tp2"),
        (6, "transformer", "pp2·dp3"),
        (8, "transformer", "pp2·dp2·tp2"),
        (16, "transformer", "pp2·dp2·cp2·tp2"),
        (16, "vit", "pp2·dp4·tp2"),
        (48, "transformer", "pp2·dp6·cp2·tp2"),
    ],
)
def test_a_layout_is_chosen_for_any_number_of_ranks(ranks, model, layout):
    chosen = parallel_4d.Config(model=model).layout(ranks)
    assert str(chosen) == layout
    assert chosen.ranks == ranks


def test_what_is_given_is_not_chosen():
    assert str(parallel_4d.Config(tpsize=2).layout(8)) == "dp4·tp2"
    assert str(parallel_4d.Config(parallel="ddp").layout(4)) == "dp4"
    assert str(parallel_4d.Config(parallel="hsdp").layout(4)) == "dp_replicate2·dp_shard2"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pp 4 --tp 2", "pp 4 · tp 2 needs a multiple of 8 ranks, and there are 4"),
        ("--pp 2 --dp_shard 4", "has 8 ranks, and there are 4"),
        ("--model cnn --cp 2", "cp 2: an image has no sequence to shard; use cp 1"),
        ("--model vit --cp 2", "cp 2: the ViT's sequence is not sharded; use cp 1"),
        (
            "--pp 2 --microbatches 3",
            "--microbatches 3: a batch of 8 .* be split into 3 equal parts; use .* 2 or",
        ),
        ("--microbatches 9 --dp_shard 4", "--microbatches 9: a batch of 8 .* into 1 to 8 parts"),
        ("--pp 4 --n_layers 1", "pp 4 with 1 stages a rank is 4 stages, and the model has 3 parts"),
        ("--parallel ddp --tp 2", "use fsdp, or tp 1"),
        ("--model cnn --activation_checkpointing full", "names no modules to checkpoint"),
        ("--model vit --tp 4 --n_layers 0", "n_layers is 0: it must be at least 1"),
        ("--cp 4 --seq_length 30", "seq_length 30 is not divisible by 2 · cp 4"),
        ("--schedule DualPipe", "--schedule"),
    ],
)
def test_refused_in_one_line(monkeypatch, capsys, tmp_path, flags, words):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("mmm.trainer.run.process_group", lambda *_: pytest.fail("a process group was made"))
    monkeypatch.setattr(sys, "argv", ["parallel_4d", *flags.split()])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        run_main(parallel_4d.main)
    said = capsys.readouterr()
    assert left.value.code == 2
    assert said.out == ""
    if "DualPipe" in flags:
        assert words in said.err
        return  # the parser's own message, in a frame
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert re.search(words, said.err), said.err
    assert list(tmp_path.iterdir()) == []
