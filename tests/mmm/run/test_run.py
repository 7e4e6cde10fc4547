"""What a run tells its ranks: that they differ, that rank 0 has no folder, that the loss is no number."""

import json
import math
import re
import time
import warnings
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from unittest.mock import patch

import pytest
import torch

import mmm.history
from mmm.errors import ConfigError, DeviceError, DivergedError, UserError
from mmm.parallel import Layout
from mmm.run import options as groups
from mmm.run.command_line import configure
from mmm.run.standard import start_run
from mmm.runtime import process_group
from mmm.runtime.device import Precision, _computes_bf16
from mmm.trainer import lm
from mmm.trainer.lm import resolve
from mmm_lab.runs.runs import read_run
from support.launcher import Launcher
from support.pool import program_on
from support.runs import make_run

CPU = torch.device("cpu")


def on_a_host(rank):
    return patch("mmm.run.rows.socket.gethostname", lambda: f"node{rank.rank}")


def train(run, losses, samples=1, tokens=0):
    """A loop that has these local losses."""
    for step in run.steps(losses, len(losses), samples=samples, tokens=tokens):
        step.log(step.batch)


def make(rank, **options):
    layout = Layout().fit(rank.world_size)
    return make_run(rank, groups.RunFlags(**options), layout, Precision("fp32", torch.float32, torch.float32))


def diverge(rank):
    """One step whose loss is no number on rank 1 alone: is the error said to be every rank's, and what does it say?"""
    run, _ = make(rank)
    # The next step has the number 3.
    run.first = 3
    losses = torch.ones(4)
    losses[3] = math.nan if rank.rank == 1 else 1.0
    with on_a_host(rank), pytest.raises(DivergedError) as raised:
        train(run, losses)
    return raised.value.on_every_rank, str(raised.value)


def test_a_loss_that_is_no_number_on_one_rank_is_every_ranks_error(run_on_ranks):
    for everywhere, text in run_on_ranks(diverge, 2):
        assert everywhere
        assert "step 3, from rank 1 on node1" in text


def diverge_between_rows(rank):
    """Rank 1's loss is infinite in two steps without a row, and a number in that after them."""
    run, lines = make(rank, log_every=4)
    losses = torch.arange(1.0, 9.0)
    if rank.rank == 1:
        # Steps 5 and 6; the row is of step 7.
        losses[5:7] = math.inf
    collectives = []
    gather = process_group.all_gather
    with (
        on_a_host(rank),
        patch("mmm.runtime.process_group.all_gather", lambda *args: (collectives.append(1), gather(*args))),
        pytest.raises(DivergedError) as raised,
    ):
        train(run, losses)
    return [row["loss"] for row in lines.kept[:2]], str(raised.value), run.clock.step, len(collectives)


def test_a_loss_that_is_no_number_between_two_rows_is_found_by_the_next(run_on_ranks):
    for rows, text, last, collectives in run_on_ranks(diverge_between_rows, 2):
        assert rows == [2.0, 10.0]
        assert "step 5, from rank 1 on node1" in text
        assert last == 7
        # One for each row, and none between them.
        assert collectives == 3


def test_what_the_record_keeps_of_a_run(tmp_path):
    """Its name, when it was and how long, and its mean rates: rows of every third step stand for three."""
    options = groups.RunFlags(device="cpu", outdir=tmp_path, plots=False, name="wide", log_every=3)
    with start_run("test", options, Layout().fit(1)) as run:
        train(run, torch.ones(7), samples=4, tokens=8)
    config = json.loads((tmp_path / "config.json").read_text())
    record = read_run(tmp_path)
    assert config["name"] == record.name == "wide"
    ended = datetime.fromisoformat(config["ended"]).timestamp()
    assert record.started < ended <= time.time()
    # One rank.
    assert config["device_hours"] == pytest.approx(config["seconds"] / 3600)
    assert config["mean_rates"] == {name: pytest.approx(record.mean_rate(name), rel=1e-6) for name in ("sps", "tps")}
    assert config["state"] == "finished"
    assert set(config["repository"] or {"commit": None}) >= {"commit"}


def test_a_deterministic_run(tmp_path):
    """Its algorithms are deterministic inside only, and its record says so."""
    options = groups.RunFlags(device="cpu", outdir=tmp_path, plots=False, deterministic=True)
    with start_run("test", options, Layout().fit(1)):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert json.loads((tmp_path / "config.json").read_text())["options"]["deterministic"] is True


def ended_by(error, outdir, steps):
    options = groups.RunFlags(device="cpu", outdir=outdir, plots=False)
    with suppress(type(error)), start_run("test", options, Layout().fit(1)) as run:
        train(run, torch.ones(steps), samples=4)
        # After the rows, as a fault of the loop would.
        raise error
    torch.distributed.destroy_process_group()


def test_a_run_that_is_refused_before_its_first_row_leaves_no_record(tmp_path):
    """The next try may have the same --outdir. What has rows stays, and so does a fault that is no user's."""
    out = tmp_path / "out"
    ended_by(UserError("the plan does not fit"), out, steps=0)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    ended_by(UserError("the plan does not fit"), out, steps=0)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    for name, error, steps in (("a", UserError("a row"), 1), ("b", DivergedError("nan"), 0), ("c", RuntimeError(), 0)):
        ended_by(error, tmp_path / name, steps)
        assert mmm.history.state(tmp_path / name) == "failed"


@pytest.mark.parametrize("name", ["", "a/b", ".", "~x", "a\tb", "x" * 81])
def test_what_names_no_run(name):
    with pytest.raises(UserError, match=r"--name"):
        groups.RunFlags(name=name).check()


# --- ranks that differ, and a folder that rank 0 cannot have ----------------------------------------------------------


def start(rank, outdir, options, differs):
    """Start a run on a rank of the pool; what it raises, and whether the error is every rank's.

    Args:
        differs: what is another on rank 1: the name of a function, and what it gives there; nothing where it is empty.
    """
    flags = {"preset": "debug", "device": "cpu", "outdir": outdir, "plots": False, "batch_size": 2}
    config = configure(lm.Config, **flags, **options[rank.rank])
    with ExitStack() as stack:
        stack.enter_context(program_on(rank))
        stack.enter_context(patch("mmm.runtime.agreement.FIRST_WORD", 0.0))
        if differs and rank.rank == 1:
            # As if rank 1's host were another.
            stack.enter_context(patch(differs[0], lambda *_: differs[1]))
        resolved = resolve(config)
        try:
            with start_run("test", config, resolved):
                return None
        except UserError as error:
            return type(error).__name__, str(error), error.on_every_rank


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        (("mmm.runtime.device._computes_bf16", True), r"fp32"),
        (
            ("mmm.run.hooks.agreement.platform.python_version_tuple", ("3", "99", "1")),
            r"3\.\d+ on .*3\.99",
        ),
        (
            ("mmm.run.hooks.agreement.main_digest", "train.py (0123)"),
            r"program's file: .*train\.py \(0123\) on rank 1",
        ),
    ],
)
def test_hosts_that_differ_are_refused(run_on_ranks, tmp_path, differs, message):
    if differs[0].endswith("bf16") and _computes_bf16(CPU):
        # This CPU computes bf16: rank 1's is said not to.
        differs = (differs[0], False)
        message = r"data type: bf16 on rank 0 \(.*\); fp32 on rank 1 .*\n.*--dtype"
    first, second = run_on_ranks(start_as_one_a_host, 2, tmp_path / "run", [{}, {}], differs)
    assert first == second
    assert (first[0], first[2]) == ("ConfigError", True)
    assert re.search(message, first[1]), first[1]
    assert not (tmp_path / "run").exists()


def start_as_one_a_host(rank, *args):
    return start(replace(rank, local_rank=0, local_world_size=1), *args)


def test_data_and_options_that_differ_are_refused_and_paths_are_not(run_on_ranks, tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"]
    for file, text in zip(files, ("x" * 9000, "x" * 9000, "x" * 8999 + "y"), strict=True):
        file.write_text(text)
    # Two paths, one content.
    same = [{"text": (file,)} for file in files[:2]]
    # One byte differs.
    other = [{"text": (file,)} for file in files[1:]]
    assert run_on_ranks(start, 2, tmp_path / "same", same, None) == [None, None]
    for options, message in (
        (other, r"data: text \(sha256 \w{12}\) on rank 0 .*\n.*data"),
        ([{"seed": 1}, {"seed": 2}], r"--seed: 1 on rank 0 \(.*\); 2 on rank 1 \(.*\)\nStart every rank"),
    ):
        first, second = run_on_ranks(start, 2, tmp_path / "run", options, None)
        assert first == second
        assert re.search(message, first[1]), first[1]
        assert not (tmp_path / "run").exists()


def float32_flags():
    cudnn = torch.backends.cudnn
    cuda = torch.backends.cuda
    owners = (getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None), cuda.matmul)
    newer = [owner.fp32_precision for owner in owners if hasattr(owner, "fp32_precision")]
    return [cudnn.allow_tf32, cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(), *newer]


@pytest.mark.parametrize("asked_for", [False, True])
@pytest.mark.parametrize(("dtype", "full"), [("fp32", True), ("bf16", False), ("fp64", False)])
def test_fp32_is_no_tf32(tmp_path, asked_for, dtype, full):
    """cuDNN's convolutions round to TensorFloat-32 by default; matrix products where a program has asked for it."""
    default = torch.get_float32_matmul_precision()
    try:
        if asked_for:
            torch.set_float32_matmul_precision("medium")
        before = float32_flags()
        # What PyTorch has by default: cuDNN may round.
        assert before[0] is True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            options = groups.RunFlags(device="cpu", dtype=dtype, outdir=tmp_path / "run", plots=False)
            with start_run("test", options, Layout().fit(1)):
                inside = float32_flags()
        assert float32_flags() == before
        if full:
            # Nothing rounds inside of a run in float32.
            assert inside[:3] == [False, False, "highest"]
            assert set(inside[3:]) <= {"ieee"}
        else:
            assert inside == before
    finally:
        torch.set_float32_matmul_precision(default)


RAISES = """
import sys
import torch
from mmm.errors import DataError
from mmm.parallel import Layout
from mmm.run import options
from mmm.trainer import Hook, run_main, start_run, whoami

def fail(hook, run, *_):
    if run.rank.rank == 1:
        raise DataError("rank 1 alone")

class Raises(Hook):
    pass

setattr(Raises, sys.argv[1], fail)

def main():
    config = options.RunFlags(device="cpu", outdir="out")
    with start_run("raises", config, Layout().fit(whoami().world_size), [Raises()]) as run:
        for step in run.steps(torch.ones(3), 3, samples=3):
            step.log(step.batch)

run_main(main)
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["start", "row", "end"])
def test_a_hook_that_raises_on_one_rank_ends_all_ranks_with_its_message(tmp_path, method):
    """The others are in a collective that this rank does not reach, and would wait for --timeout: 10 minutes."""
    launcher = Launcher(tmp_path)
    launcher.write("raises.py", RAISES)
    done = launcher.run("-n", "3", "--device", "cpu", "python3", "raises.py", method)
    assert done.returncode == 2
    # Once, and not from each rank.
    assert (done.stdout + done.stderr).count("rank 1 alone") == 1
    assert "Connection closed" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("config", "job", "message"),
    [
        ({"run": groups.RunFlags()}, Layout(), "the config is of the class dict"),
        (groups.RunFlags, Layout(), "the config is of the class type"),
        (groups.RunFlags(), {"dp": 1}, "the job is of the class dict"),
    ],
)
def test_what_is_no_config_or_job_is_refused_by_its_class(config, job, message):
    """A dict of flags ended in an AttributeError of a line of mmm."""
    with pytest.raises(ConfigError, match=message), start_run("dict", config, job):
        pass


def test_mps_runs_the_trainers_alone(monkeypatch, no_process_group):
    """The others make groups by PyTorch's own calls, which MPS has none for: refused before any is made."""
    monkeypatch.setattr("mmm.run.run.choose_device", lambda *_: torch.device("mps"))
    refused = pytest.raises(DeviceError, match=r"--device")
    with refused, start_run("zero", groups.RunFlags(), Layout().fit(1)):
        pass
