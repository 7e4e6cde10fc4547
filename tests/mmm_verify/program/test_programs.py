"""Unedited scripts: those that are right are the same on one rank and on several, and each mistake is named."""

import hashlib
import json
from pathlib import Path

import pytest

from mmm_verify import verify_program
from mmm_verify.command import main
from mmm_verify.program.run import in_place_of
from support.clock import PATIENCE, long

SCRIPTS = Path(__file__).parent / "scripts"


def verified(script, *args, ranks=2, **settings):
    return verify_program([str(SCRIPTS / script), *args], (1, ranks), timeout=PATIENCE, **settings)


@pytest.mark.parametrize(
    ("script", "args", "ranks", "layout"),
    [
        ("ddp.py", ["--workers", "1"], 2, "dp2"),
        ("by_hand.py", [], 2, "dp2"),
        ("sharded.py", ["both"], 4, "dp2·tp2"),
        long("ddp.py", [], 4, "dp4"),
        long("by_hand.py", [], 4, "dp4"),
        long("sharded.py", ["fsdp"], 4, "dp4"),
        long("sharded.py", ["tp"], 4, "tp4"),
        ("optimizers.py", ["gan"], 2, "dp2"),
        ("optimizers.py", ["zero"], 2, "dp2"),
        ("optimizers.py", ["twice"], 2, "dp2"),
        ("optimizers.py", ["closure"], 2, "dp2"),
        ("optimizers.py", ["fsdp1"], 2, "dp2"),
        long("optimizers.py", ["fsdp1-original"], 2, "dp2"),
        long("optimizers.py", ["zero"], 4, "dp4"),
        ("averages.py", ["in_step"], 2, "dp2"),
        ("averages.py", ["hook"], 2, "dp2"),
        ("averages.py", ["weights"], 2, "dp2"),
        ("averages.py", ["evaluates"], 2, "dp2"),
    ],
)
def test_right(script, args, ranks, layout):
    verdict = verified(script, *args, ranks=ranks)
    assert verdict.same, verdict
    assert verdict.layout.endswith(f"{script}, {layout}")
    assert verdict.dtype == "float32"
    # Two steps are compared, and the tolerance is that of float32.
    assert verdict.compared["step 2"].startswith("same")
    assert 1e-7 < verdict.tolerances["loss"] < 1e-4


def test_a_script_in_float64_is_compared_to_its_noise():
    """A factor of 1 + 1e-8 is far more than its rounding, and far less than float32's."""
    verdict = verified("averages.py", "nearly", "float64")
    assert verdict.exit_code == 1, verdict
    assert verdict.dtype == "float64"
    assert "0.bias on rank 0: 1.00000001" in str(verdict)


def test_autocast_is_compared_to_the_noise_of_its_type():
    verdict = verified("optimizers.py", "bf16")
    assert verdict.same, verdict
    assert verdict.dtype == "bf16"
    assert 1e-3 < verdict.tolerances["loss"] < 0.25


@pytest.mark.parametrize(
    ("script", "args", "first", "says"),
    [
        ("ddp.py", ["--bug", "outside"], "gradient of model2.factor", "missing all-reduce over dp"),
        ("ddp.py", ["--bug", "times"], "the loss", "2 times (the size of dp) what it is on one device"),
        ("by_hand.py", ["sum"], "every gradient", "2 times (the size of dp) what it should be"),
        ("by_hand.py", ["clip_first"], "every gradient", "was clipped on each rank, by the norm of its own gradients"),
        ("by_hand.py", ["start"], "0.weight", "0.weight on rank 1: differs"),
        ("sharded.py", ["fsdp", "ignored"], "gradient of 1.norm.weight", "missing all-reduce over dp"),
        ("sharded.py", ["tp", "half"], "every gradient", "1/2 times (one over the size of tp) what it should be"),
        ("averages.py", ["divided_twice"], "every gradient", "1/2 times (one over the size of dp) what it should be"),
        ("averages.py", ["forgotten"], "gradient of 2.bias", "missing all-reduce over dp"),
        ("averages.py", ["adamw_weights"], "0.weight", "an optimizer other than SGD"),
    ],
)
def test_wrong(script, args, first, says):
    verdict = verified(script, *args)
    assert verdict.exit_code == 1, verdict
    assert verdict.first.startswith(first)
    assert says in str(verdict)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--bug", "padding"], "one rank had 10, and 4 ranks had 12, 2 of them twice: a DistributedSampler repeats"),
        (["--bug", "seed"], "the ranks drew other samples: in step 1, "),
        (["--bug", "no_sampler"], "4 ranks had 2, all of them on every rank: does a DistributedSampler"),
        (["--batch", "2"], 'as by --one-rank-args "--batch-size 8"'),
    ],
)
def test_other_samples_are_not_compared(args, says):
    verdict = verified("ddp.py", *args, ranks=4)
    assert verdict.exit_code == 2
    assert says in verdict.reason


@pytest.mark.parametrize(
    ("args", "others", "expected"),
    [
        ("--cp 2 --lr 0.1", "--cp 1", "--lr 0.1 --cp 1"),
        ("--cp=2 data.txt", "--cp 1", "data.txt --cp 1"),
        ("--cp 2 data.txt", "--cp=1", "data.txt --cp=1"),
        ("--scale 3 data.txt", "--scale -1", "data.txt --scale -1"),
        ("--betas 0 0.9 --fast data.txt", "--fast --betas 0 0.5", "data.txt --fast --betas 0 0.5"),
        ("batch=8", "batch=16", "batch=8 batch=16"),
    ],
)
def test_a_flag_of_one_rank_takes_the_place_of_the_same_flag(args, others, expected):
    """Scripts on `start_run` refused the second --cp."""
    assert in_place_of(args.split(), others.split()) == tuple(expected.split())


def test_one_rank_with_the_global_batch():
    verdict = verified("ddp.py", "--batch", "4", one_rank_args=["--batch", "8"])
    assert verdict.same, verdict


def test_replicas_that_all_do_the_same_prove_nothing():
    verdict = verified("by_hand.py", "alike")
    assert verdict.exit_code == 2
    headline, *_ = str(verdict).splitlines()
    assert headline.startswith("not parallel: ")
    assert "2 ranks did the same run" in headline
    assert "tp2" not in headline


def test_plain_tensors_that_are_cut_by_hand_are_parallel():
    verdict = verified("cut_by_hand.py")
    assert verdict.same, verdict
    assert verdict.layout.endswith("tp2")


def test_other_weights_are_not_compared():
    verdict = verified("by_hand.py", "other_start")
    assert verdict.exit_code == 2
    assert "the ranks begin with other weights than one rank, such as 0.weight" in verdict.reason


def test_a_batch_norm_gets_a_note():
    verdict = verified("by_hand.py", "batch_norm")
    assert verdict.exit_code == 1
    assert "note: 1 is a batch norm: each rank computes it over its own samples" in str(verdict)


def test_the_fixture(verify_program):
    script = str(SCRIPTS / "by_hand.py")
    assert verify_program([script], (1, 2), timeout=PATIENCE).same
    with pytest.raises(pytest.fail.Exception, match="missing all-reduce over dp"):
        verify_program([script, "forgotten"], (1, 2), timeout=PATIENCE)


def test_the_certificate(tmp_path, capsys):
    script = SCRIPTS / "by_hand.py"
    file = tmp_path / "verdict.json"
    argv = ["--program", str(script), "forgotten", "--ranks", "1,2", "--json", str(file)]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "first difference: gradient of 3.bias" in out
    assert "3.bias on rank 0: each dp rank kept its own value" in out
    certificate = json.loads(file.read_text())
    assert certificate["functions"]["program"] == {
        "name": f"{script} forgotten",
        "sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
    }
    assert certificate["verdicts"][0]["result"] == "not the same"
