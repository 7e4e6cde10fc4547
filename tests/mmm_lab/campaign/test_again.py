"""mmm rerun: the command line that a record makes, what is refused, and a run that is started again."""

import json
import shlex
import subprocess
import sys

import pytest

from mmm.errors import ConfigError, RecordError
from mmm_lab.campaign.again import again
from mmm_lab.cli import main as cli

PROGRAM = "python3 -m mmm.trainer.vit"


@pytest.fixture
def run(tmp_path):
    return tmp_path / "a"


def record(run, **facts):
    """Write the record of a run on two ranks by launch; `facts` replace it, those that are "missing" are left out."""
    config = {
        "command": [*shlex.split(PROGRAM), "--seed", "3"],
        "launch": f"launch -n 2 {PROGRAM} --seed 3 --outdir runs/a",
        "started_by": "launch",
        "options": {"seed": 3, "resume": None},
        "config_file": None,
        "ranks": [{}, {}],
        "hosts": ["vm"],
        **facts,
    }
    config = {name: value for name, value in config.items() if value != "missing"}
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps(config))
    return run


def line(run, changes="--lr 0.1", **options):
    return shlex.join(again(run, shlex.split(changes), **options))


def test_flags_come_from_the_record_and_changes_after_them(run):
    assert line(record(run)) == f"launch -n 2 {PROGRAM} --config {run} --lr 0.1"


def test_the_number_of_ranks_is_that_of_the_record_or_of_the_user(run):
    record(run, launch=f"launch --device cpu -- {PROGRAM} --seed 3", ranks=[{}] * 3)
    assert line(run) == f"launch --device cpu -n 3 {PROGRAM} --config {run} --lr 0.1"
    assert line(run, ranks=4) == f"launch --device cpu -n 4 {PROGRAM} --config {run} --lr 0.1"
    record(run, launch=f"launch -ppn 2 --nproc=2 {PROGRAM}")
    assert line(run, ranks=4) == f"launch -ppn 2 -n 4 {PROGRAM} --config {run} --lr 0.1"
    record(run, launch=f"launch --elastic 2:4 {PROGRAM}", ranks=[{}] * 3)
    assert line(run) == f"launch --elastic 2:4 {PROGRAM} --config {run} --lr 0.1"


def test_a_run_that_launch_did_not_start(run):
    record(run, launch=None, started_by="torchrun")
    assert line(run) == f"launch -n 2 {PROGRAM} --config {run} --lr 0.1"


def test_a_resumed_run_is_asked_where_to_begin(run):
    """Without a word the new run would begin at step 0, and its losses would be others."""
    record(run, options={"resume": "/runs/b/checkpoints/step-3"})
    with pytest.raises(ConfigError, match="--resume /runs/b/checkpoints/step-3"):
        line(run)
    assert line(run, "--resume c") == f"launch -n 2 {PROGRAM} --config {run} --resume c"
    # The newest checkpoint of its own folder; the new run has another one.
    assert line(record(run, options={"resume": "auto"}), "") == f"launch -n 2 {PROGRAM} --config {run}"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"ranks": "missing"}, "'ranks'"),
        ({"config_file": "missing"}, "takes --config"),
        ({"launch": None, "command": "missing"}, "'command'"),
        ({"launch": None, "command": [1]}, "damaged"),
        ({"launch": 7}, "damaged"),
        ({"launch": "launch 'x"}, "damaged"),
        ({"launch": "launch -n 2"}, "damaged"),
        ({"launch": f"launch --env TOKEN=… {PROGRAM}"}, "TOKEN"),
        ({"launch": f"launch --env=TOKEN=… {PROGRAM}"}, "TOKEN"),
    ],
)
def test_a_record_that_is_refused(run, facts, message):
    with pytest.raises(RecordError, match=message):
        line(record(run, **facts))


def test_a_file_that_is_no_record_is_refused(run, capsys):
    run.mkdir()
    for text in (None, "{", "[1]"):
        if text:
            (run / "config.json").write_text(text)
        assert cli.main(["rerun", str(run), "--dry-run"]) == 2
        assert str(run) in capsys.readouterr().err


def test_a_dry_run_prints_the_line(run, capsys):
    record(run)
    assert cli.main(["rerun", str(run), "--dim", "8", "--dry-run", "--dp_shard", "-1"]) == 0
    assert capsys.readouterr().out == f"launch -n 2 {PROGRAM} --config {run} --dim 8 --dp_shard -1\n"


@pytest.mark.long
def test_a_run_is_made_again_with_one_change(tmp_path):
    """The same flags give the same losses; another rate other ones. The new record names the one that it is from."""
    flags = "--dataset fake --no_plots --max_iters 3 --betas 0.5 0.9 --seed 7 --device cpu"
    first = "-m mmm_launch -n 2 python3 -m mmm.trainer.vit --outdir a"
    losses = {}
    for argv in (
        f"{first} {flags}",
        "-m mmm_lab.cli.main rerun a --outdir b",
        "-m mmm_lab.cli.main rerun b --outdir c --lr 0.5",
    ):
        done = subprocess.run([sys.executable, *argv.split()], cwd=tmp_path, capture_output=True, text=True, check=True)
        name = argv.partition("--outdir ")[2][0]
        losses[name] = [word for word in done.stdout.split() if word.startswith("loss=")]
    assert len(losses["a"]) == 3
    assert losses["a"] == losses["b"]
    assert losses["b"] != losses["c"]
    config = json.loads((tmp_path / "c/config.json").read_text())
    assert config["config_file"]["path"] == str(tmp_path / "b/config.json")
    options = config["options"]
    assert (options["lr"], options["betas"], options["seed"]) == (0.5, [0.5, 0.9], 7)
    assert len(config["ranks"]) == 2
