"""``python3 -m mmm_lab.parity`` as a user runs it: what passes, what must not, what is refused, what is left behind."""

import json
import re
from pathlib import Path

import pytest
import torch

from mmm_lab.parity.__main__ import main

DOCS = Path(__file__).parent.parent.parent.parent / "docs"
ASKED_FOR = {"layout", "ranks", "max_rel_loss_diff", "max_grad_diff", "passed"}

PACKED = ("--case", "packed")


def rows_of(path):
    return json.loads(Path(path).read_text())


LONG = [  # of more ranks than `test_matrix.py` has, and by flags of the command
    ("--model", "transformer", "--layout", "pp2.dp2.tp2", "--layout", "dp2.tp2.cp2", *PACKED),
    ("--model", "vit", "--layout", "pp2.dp2.tp2"),
    ("--model", "moe", "--layout", "pp2.dp2.tp2.ep2"),
    ("--model", "cnn", "--layout", "dp3", "--global_batch_size", 18),
    ("--model", "cnn", "--layout", "dp2", "--case", "zero2", "--dtype", "fp32"),
    ("--model", "support.parity_models.lora", "--layout", "dp2", "--layout", "tp2"),
]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "transformer", "--layout", "pp2.cp2", "--case", "ulysses+packed"),
        ("--model", "cnn", "--layout", "pp2"),
        *(pytest.param(arguments, marks=pytest.mark.long) for arguments in LONG),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[1::2])),
)
def test_passes(parity, tmp_path, arguments):
    """The bounds of the page hold: 1e-9 in float64; float32 is measured."""
    file = tmp_path / "parity.json"
    done = parity(*arguments, "--json", file)
    assert done.code == 0, done.out + done.err
    rows = rows_of(file)
    assert rows
    for row in rows:
        assert row.keys() >= ASKED_FOR
        limit = 1e-3 if "fp32" in arguments else 1e-9
        assert row["passed"]
        assert 0 <= row["max_rel_loss_diff"] <= limit
        assert 0 < row["max_grad_diff"] <= limit


@pytest.mark.parametrize(
    ("bug", "arguments", "pattern"),
    [
        ("gradients_averaged_over_dp", ("cnn", "dp2"), r"1/2 times \(one over the size of dp_shard\)"),
        ("same_samples_on_all_dp_ranks", ("cnn", "dp2"), "the batch: sample"),
        ("optimizer_gets_whole_parameters", ("cnn", "dp2", "--case", "zero2"), "is not updated"),
        pytest.param(
            "keys_bias_gets_a_gradient",
            ("support.parity_models.plain_gpt", "dp2"),
            r"key\.bias on rank \d",
            marks=pytest.mark.long,
        ),
    ],
)
def test_planted_bugs_fail(parity, tmp_path, bug, arguments, pattern):
    model, layout, *more = arguments
    file = tmp_path / "parity.json"
    flags = ("--model", model, "--layout", layout, *more, "--optimizer", "sgd", "--json", file)
    done = parity(*flags, bug=bug)
    assert done.code == 1, done.out + done.err
    (row,) = rows_of(file)
    assert not row["passed"]
    assert re.search(pattern, row["reason"]), row["reason"]
    assert "0 of 1 comparison" in done.out


def test_a_rank_that_dies_is_one_error(parity, tmp_path):
    """The layouts after it are compared all the same."""
    file = tmp_path / "parity.json"
    flags = ("--model", "cnn", "--layout", "dp2", "--layout", "1", "--optimizer", "sgd", "--json", file)
    done = parity(*flags, bug="rank_1_of_2_is_killed")
    assert done.code == 1, done.out + done.err
    rows = rows_of(file)
    assert [(row["layout"], row["passed"], row["max_grad_diff"] is None) for row in rows] == [
        ("dp2", False, True),
        ("1", True, False),
    ]
    assert "rank 1: killed by SIGKILL" in rows[0]["reason"]


@pytest.mark.long
def test_a_fourth_model_by_the_recipe(parity, tmp_path):
    """The two files of docs/models.md, as they stand there, and nothing else."""
    blocks = re.findall(r"```python\n# (mine/\S+)\n(.*?)```", (DOCS / "models.md").read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["mine/models/mlp.py", "mine/parallel/plans/mlp.py"]
    for name, code in blocks:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(code)
    flags = ("--model", "mine/parallel/plans/mlp.py")
    done = parity(*flags, "--layout", "dp2.tp2", "--layout", "pp2.dp2", "--json", "parity.json", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert [row["layout"] for row in rows_of(tmp_path / "parity.json")] == ["dp2·tp2", "pp2·dp2"]
    for layout, why in (("cp2", "cp 2: the MLP has no sequence to split; use cp 1"), ("tp5", "hidden 24 is not divi")):
        refused = parity(*flags, "--layout", layout, cwd=tmp_path)
        assert (refused.code, why in refused.err) == (2, True), refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "cnn", "--layout", "1", "--case", "packed"),
            "--case",
        ),
        (
            ("--model", "cnn", "--layout", "dp3"),
            "change --global_batch_size, or dp",
        ),
        (("--global_batch_size", "0"), "--global_batch_size 0"),
        (("--model", "gpt", "--layout", "dp2.ep2"), "GPT"),
        (("--model", "cnn", "--layout", "cp2"), "--model"),
        (("--model", "cnn", "--layout", "dp4.ep2"), "--model"),
        (("--model", "moe", "--layout", "dp4.ep3"), "dp_shard 4"),
        (("--model", "vit", "--layout", "tp3"), "n_heads 8"),
        (("--model", "cnn", "--layout", "tp2", "--case", "ddp"), "--layout has dp_replicate"),
        (("--model", "cnn", "--layout", "dp2.tp2", "--case", "ddp"), "zero1"),
        (("--model", "cnn", "--layout", "dp2", "--case", "GPipe"), "--case GPipe"),
        (("--case", "GPipe"), "--case GPipe goes with --layout"),
        (("--layout", "dp2", "--ranks", "4"), "--ranks 4"),
        (("--model", "resnet"), "--model"),
        pytest.param(
            ("--model", "cnn", "--layout", "dp2", "--device", "cuda"),
            "sees no cuda device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refused_in_one_line(parity, tmp_path, arguments, message):
    done = parity(*arguments, cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_without_a_model_those_that_go_are_compared(parity):
    done = parity("--layout", "dp2.ep2", "--optimizer", "sgd")
    assert done.code == 0, done.out + done.err
    assert "left out: cnn: ep 2: the CNN has no experts; use ep 1\n" in done.out
    assert "left out: transformer: ep 2: the model has no experts to shard" in done.out
    assert "3 of 3 comparisons" in done.out


def test_not_as_a_rank(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--model", "cnn"]) == 2
    assert "mmm_lab.parity" in capsys.readouterr().err


def test_dry_run(capsys):
    assert main(["--dry_run", "--ranks", "4", "--model", "cnn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 ranks  cnn dp2·tp2 (fsdp): sgd" in lines
    assert all(line.startswith("4 ranks") for line in lines)
