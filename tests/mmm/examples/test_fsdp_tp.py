"""The main job as a user runs it: real commands, real ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray

import mmm.history
from mmm.errors import UserError
from mmm.examples.fsdp_tp import Config, train
from mmm.run.command_line import configure
from support.clock import PATIENCE, stretched

MODULE = ["python3", "-m", "mmm.examples.fsdp_tp"]
TINY = ["--preset", "debug", "--seq_length", "16", "--global_batch_size", "4", "--eval_batches", "1"]
LAUNCH = str(Path(sys.executable).parent / "launch")


def launch(ranks, outdir, *flags, timeout=PATIENCE):
    command = [LAUNCH, "-n", str(ranks), "--device", "cpu", *MODULE, *TINY, "--outdir", str(outdir), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run on dp2·tp2, and its folder."""
    outdir = tmp_path_factory.mktemp("run") / "out"
    done = launch(4, outdir, "--tpsize", "2", "--max_iters", "7", "--dtype", "fp64", "--eval_every", "3")
    assert done.returncode == 0, done.stderr
    return done, outdir


def test_log(finished):
    # Gloo of PyTorch 2.8 to 2.10 prints lines of its own.
    lines = [line for line in finished[0].stdout.splitlines() if not line.startswith("[Gloo]")]
    steps = [line for line in lines if " - iter=" in line]
    assert len(steps) == 7
    head = r"\[[-\d]+ [:\d.]+\]\[INFO\]\[fsdp_tp:\d+\] - "
    assert re.match(head + r"iter=0/7 loss=5\.\d{4} dt=\S+ dtf=\S+ dtb=\S+ ", steps[0])
    assert re.match(head + r"iter=6/7 loss=\S+ .*tps=(\d{3,}|\d\d\.\d)$", steps[-1])
    assert max(map(len, steps)) <= 120
    assert (finished[1] / "log.txt").read_text().count(" - iter=") == 7
    assert any("4 ranks (launch), layout dp2·tp2, cpu" in line and "; gloo; " in line for line in lines)
    mesh = lines.index("ranks on the mesh, along tp")
    assert lines[mesh + 1 : mesh + 3] == ["dp_shard 0   0 1", "dp_shard 1   2 3"]
    assert any(" - data: text, Python " in line and " train bytes, " in line for line in lines)
    # Before the first loss nobody has to scroll.
    assert lines.index(steps[0]) <= 24
    # What the record has is one line, and not a listing of the dataset.
    assert any(line.startswith("mmm.history.load(") and ": 7 rows of 4 ranks; iter, loss, " in line for line in lines)
    assert any("training loss (loss)" in line for line in lines)
    assert any("feed_forward.w2.weight" in line and "dim 1 over tp, dim 0 over dp_shard" in line for line in lines)
    assert any("record:" in line and "train_dataset.h5" in line for line in lines)


def test_the_validation_loss_does_not_depend_on_the_batch_size(tmp_path):
    """The last batch of a text has fewer targets, and counts by their number."""
    (tmp_path / "text").write_bytes(bytes(np.random.RandomState(0).randint(97, 123, 2990, dtype=np.uint8)))
    flags = {"preset": "debug", "text": (tmp_path / "text",), "seq_length": 32, "dtype": "fp64", "lr": 1e-30}
    flags |= {"max_iters": 1, "eval_every": 1, "eval_batches": 1000, "plots": False, "optimizer": "sgd"}
    losses = []
    for size in (1, 4, 16):
        train(configure(Config, **flags, global_batch_size=size, outdir=tmp_path / str(size)))
        losses.append(float(mmm.history.load(tmp_path / str(size)).val_loss[-1]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-12)


def test_details_are_in_the_file_and_not_printed(finished):
    printed = finished[0].stdout
    log = (finished[1] / "log.txt").read_text()
    for detail in ("Total params:", "dtf          forward time, s", "rank  local  host"):
        assert detail not in printed
        assert log.count(detail) == 1


def test_record(finished):
    outdir = finished[1]
    data = xarray.open_dataset(outdir / "train_dataset.h5", engine="h5netcdf")
    assert dict(data.sizes) == {"draw": 7, "rank": 4}
    assert data.iter.values.tolist() == list(range(7))
    assert data.loss.dtype == np.float64
    parts = data.dtd + data.dtf + data.dtb + data.dto
    np.testing.assert_allclose(parts, data.dt, rtol=1e-12)
    assert data.dt.dims == ("draw", "rank")
    assert np.isfinite(data.val_loss.values).nonzero()[0].tolist() == [2, 5, 6]
    with h5py.File(outdir / "train_dataset.h5") as file:
        assert file["loss"].shape == (7,)
    assert (outdir / "plots/mplot/pngs/summary.png").stat().st_size > 10_000
    assert "training loss (loss)" in (outdir / "plots/tplot/summary.txt").read_text()
    drawn = [path.relative_to(outdir / "plots").as_posix() for path in (outdir / "plots").rglob("*") if path.is_file()]
    assert sorted(drawn) == ["mplot/pngs/summary.png", "tplot/summary.txt"]
    assert not (outdir / "journal.jsonl").exists()


def test_summary_costs_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        train(configure(Config, n_layers=24, vocab_size=32000, batch_size=16, summary=True))
    assert left.value.code == 0
    out = capsys.readouterr().out
    for entry in ("Embedding", "8,192,000", "TransformerBlock", "717,312", "Total params: 33,599,744"):
        assert entry in out
    assert list(tmp_path.iterdir()) == []


def lives(pid):
    """Whether a process runs; one that has ended and waits to be collected does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_killed_rank_ends_the_run_and_keeps_the_rows(tmp_path):
    outdir = tmp_path / "out"
    command = [LAUNCH, "-n", "4", "--device", "cpu", *MODULE, *TINY, "--max_iters", "100000"]
    command += ["--outdir", str(outdir), "--flush_every", "10"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if " - iter=17/" in line:
            break
    pids = [rank["pid"] for rank in json.loads((outdir / "config.json").read_text())["ranks"]]
    os.kill(pids[2], signal.SIGKILL)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - begin < stretched(10)
    assert process.returncode == 137
    assert "rank 2" in errors
    assert "SIGKILL" in errors
    assert not [pid for pid in pids if lives(pid)]
    assert mmm.history.load(outdir).sizes["draw"] >= 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tpsize", "3"], r"tp 3 needs a multiple of 3 ranks, and there are 4: start that many, `launch -n 3 "),
        pytest.param(
            ["--tpsize", "2", "--n_kv_heads", "3"],
            r"n_heads \d+ is not divisible by n_kv_heads 3",
            marks=pytest.mark.long,
        ),
        pytest.param(["--max_itrs", "3"], r"Did you mean --max_iters\?", marks=pytest.mark.long),
    ],
)
def test_one_clear_message(tmp_path, flags, message):
    begin = time.monotonic()
    done = launch(4, tmp_path / "out", *flags)
    # 4 s on a quiet machine.
    assert time.monotonic() - begin < stretched(10)
    assert done.returncode == 2
    assert len(re.findall(message, done.stderr)) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text": (Path("nowhere.txt"),)}, "--text nowhere.txt"),
        ({"text": (Path("/dev/null"),)}, "--text /dev/null"),
        ({"batch_size": 2, "global_batch_size": 3}, "give one of them"),
        ({"device": "cuda"}, "sees no cuda device"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_before_any_process_group(monkeypatch, config, message, no_process_group):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=re.escape(message)):
        train(configure(Config, **{"tpsize": 4, **config}))


def test_a_record_is_not_overwritten_unasked(finished):
    config = configure(Config, outdir=finished[1], max_iters=1, preset="debug")
    with pytest.raises(UserError, match="overwrite"):
        train(config)
