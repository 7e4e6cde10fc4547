"""The program of docs/your-script.md as it stands there, with what docs/your-run.md adds, and the promised names."""

import importlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import mmm.history
import mmm.trainer
from mmm.errors import ConfigError, DataError
from mmm.run.command_line import configure
from mmm.run.run import Run
from support.clock import PATIENCE
from support.pool import program_on

DOCS = Path(__file__).parent.parent.parent.parent / "docs"
# The page whose program is run.
SCRIPT = (DOCS / "your-script.md").read_text(encoding="utf-8")
RUN = (DOCS / "your-run.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
FLAGS = {"dtype": "fp64", "global_batch_size": 8, "steps": 4}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    (code,) = re.findall(r"```python\n(# denoise\.py\n.*?)```", SCRIPT, re.DOTALL)
    path = tmp_path_factory.mktemp("script") / "denoise.py"
    path.write_text(code)
    return path


def edited(script, page):
    """The script, with the lines of a page's diff, in a file named after the page."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    code = script.read_text()
    for hunk in diff.split("@@\n"):
        old, new = (
            "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[0] in kinds) for kinds in (" -", " +")
        )
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    path = script.with_name(f"{page}.py")
    path.write_text(code)
    return path


@pytest.fixture(scope="module")
def resumable(script):
    """The script, with the page's lines on checkpoints."""
    return edited(script, "your-run.md")


def load(path):
    spec = importlib.util.spec_from_file_location("denoise", path)
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for it.
    sys.modules["denoise"] = module
    spec.loader.exec_module(module)
    return module


def on_a_rank(rank, path, outdir, axis="tp"):
    """The script's own `train`, on a rank of the pool, whose process group is there already: dp2 times 2 of `axis`."""
    denoise = load(path)
    with program_on(rank), patch.object(denoise, "whoami", lambda: rank):
        denoise.train(configure(denoise.Config, **FLAGS, **{axis: 2}, device="cpu", outdir=outdir))


@pytest.fixture(scope="module")
def alone(script, tmp_path_factory):
    outdir = tmp_path_factory.mktemp("alone")
    denoise = load(script)
    denoise.train(configure(denoise.Config, **FLAGS, device="cpu", outdir=outdir))
    return outdir


def same(one, many):
    first, second = (mmm.history.load(folder) for folder in (one, many))
    np.testing.assert_allclose(second.loss, first.loss, rtol=1e-9)
    assert len(first.loss) == FLAGS["steps"]
    # it learns
    assert first.loss[-1] < 0.8 * first.loss[0]
    # The seconds of each step on each rank.
    assert second.dt.shape == (FLAGS["steps"], 4)
    tests = [json.loads((folder / "config.json").read_text())["test_loss"] for folder in (one, many)]
    assert tests[1] == pytest.approx(tests[0], rel=1e-9)
    states = [torch.load(folder / "model.pt", weights_only=True) for folder in (one, many)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-7, atol=1e-9)


def test_the_same_losses_on_a_mesh(run_on_ranks, script, alone, tmp_path):
    run_on_ranks(on_a_rank, 4, script, tmp_path)
    same(alone, tmp_path)


@pytest.mark.long
def test_the_same_losses_on_rows_of_each_field(run_on_ranks, script, alone, tmp_path):
    """docs/space.md leaves no line out that a loop needs: a rank that cuts no rows, or divides by those of its own."""
    run_on_ranks(on_a_rank, 4, edited(script, "space.md"), tmp_path, "cp")
    same(alone, tmp_path)


def test_data_that_ends_before_the_steps_is_said(script, tmp_path):
    denoise = load(script)
    with (
        patch.object(denoise, "local_batches", lambda *_: iter([[0, 1], [2, 3]])),
        pytest.raises(DataError, match="2 batches"),
    ):
        denoise.train(configure(denoise.Config, **FLAGS, device="cpu", outdir=tmp_path / "out"))
    # A run that does not end leaves it.
    torch.distributed.destroy_process_group()
    assert len(mmm.history.load(tmp_path / "out").loss) == 2


def test_a_step_that_was_not_logged_is_said(script, tmp_path):
    denoise = load(script)
    with (
        patch("mmm.run.step.Step.log", lambda *_: None),
        pytest.raises(ConfigError, match=r"step\.log\(loss\)"),
    ):
        denoise.train(configure(denoise.Config, **FLAGS, device="cpu", outdir=tmp_path / "out"))
    torch.distributed.destroy_process_group()


def test_no_batch_to_evaluate_on_is_said(script, tmp_path):
    denoise = load(script)
    mean_loss = Run.mean_loss
    with (
        patch.object(Run, "mean_loss", lambda run, losses: mean_loss(run, ())),
        pytest.raises(DataError, match="there is no batch to evaluate on"),
    ):
        denoise.train(configure(denoise.Config, **FLAGS, device="cpu", outdir=tmp_path / "out"))
    torch.distributed.destroy_process_group()


def test_plain_pytorch_reads_its_model(script, alone):
    model = load(script).UNet().double()
    model.load_state_dict(torch.load(alone / "model.pt", weights_only=True))


def test_it_stops_and_goes_on(resumable, tmp_path):
    """By a signal in its second step, and so after its third; and then by nothing."""
    denoise = load(resumable)
    steps = Run.steps

    def interrupted(*args, **named):
        for step in steps(*args, **named):
            if step.index == 1:
                signal.raise_signal(signal.SIGTERM)
            yield step

    def train(folder, **more):
        denoise.train(
            configure(denoise.Config, **FLAGS, device="cpu", outdir=tmp_path / folder, checkpoint_every=50, **more)
        )

    train("one")
    with patch.object(Run, "steps", interrupted), pytest.raises(SystemExit, match="75"):
        train("two")
    torch.distributed.destroy_process_group()
    assert len(mmm.history.load(tmp_path / "two").loss) == 3
    train("two", resume=Path("auto"))
    one, two = (mmm.history.load(tmp_path / folder) for folder in ("one", "two"))
    assert two.loss.values.tolist() == one.loss.values.tolist()
    assert two.lr.values.tolist() == one.lr.values.tolist()
    states = [torch.load(tmp_path / folder / "model.pt", weights_only=True) for folder in ("one", "two")]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])


@pytest.mark.long
@pytest.mark.parametrize("started_by", ["launch", "torchrun"])
def test_the_same_losses_under_each_launcher(script, alone, tmp_path, started_by):
    start = {
        "launch": [BIN / "launch", "-n", "4", "--device", "cpu", "python3"],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "4"],
    }
    flags = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    command = [*start[started_by], script, *flags, "--tp", "2", "--device", "cpu", "--outdir", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[denoise:") >= FLAGS["steps"]
    assert len(re.findall(r" - iter=\d+\S* loss=[\d.]+ dt=[\d.e-]+ dtf=", done.stdout)) == FLAGS["steps"]
    same(alone, tmp_path / "out")


@pytest.mark.long
def test_what_does_not_fit_is_said_in_one_line(script, tmp_path):
    for flags, message in (
        (("--global_batch_size", "600"), "a global batch of 600 samples, and there are 512"),
        (("--tp", "3"), "tp 3 needs a multiple of 3 ranks"),
        (("--dtype", "fp16"), "{auto,fp32,bf16,fp64}"),
    ):
        command = [sys.executable, script, *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
        assert done.returncode == 2
        assert message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_names_that_the_page_promises():
    """All that the program imports of mmm, and more, from few places; whoever takes one away has to change the page."""
    promised = {}
    for room, names in re.findall(r"^- `(mmm[\w.]+)`: (.*?)(?=^- |\Z)", SCRIPT, re.DOTALL | re.MULTILINE):
        promised[room] = re.findall(r"`(\w+)`", names)
        for name in promised[room]:
            assert hasattr(importlib.import_module(room), name), f"{room}.{name}"
    rooms = {"mmm.parallel", "mmm.data.arrays", "mmm.run.options", "mmm.trainer", "mmm.errors", "mmm.history"}
    assert promised.keys() == rooms
    for room, names in re.findall(r"^from (mmm\.\w+) import (.*)$", SCRIPT + RUN, re.MULTILINE):
        taken = set(names.split(", "))
        assert taken <= set(promised.get(room, ())) or {f"{room}.{name}" for name in taken} <= promised.keys(), room
    assert promised["mmm.trainer"]
    assert set(promised["mmm.trainer"]) == set(dir(mmm.trainer))
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        mmm.trainer.runn  # noqa: B018


def test_asking_for_a_name_imports_what_it_needs_and_no_more():
    light = "assert 'torch' not in sys.modules"
    code = f"import sys, mmm.trainer; {light}; mmm.trainer.whoami; {light}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_hook_of_the_page(tmp_path, script):
    """Its code, as it stands there, in a run of the page's script."""
    (code,) = re.findall(r"```python\n(# gradients\.py\n.*?)```", RUN, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 20
    names = {}
    exec(code, names)
    histogram = names["GradientHistogram"]()
    denoise = load(script)
    started = denoise.start_run

    def start(*args):
        return started(*args, [histogram])

    with patch.object(denoise, "start_run", start):
        denoise.train(configure(denoise.Config, **FLAGS, device="cpu", outdir=tmp_path))
    data = mmm.history.load(tmp_path)
    # (bounds, steps)
    parts = np.stack([data[f"grad_le_{bound:g}"] for bound in histogram.BOUNDS])
    assert parts.shape == (3, FLAGS["steps"])
    assert (np.diff(parts, axis=0) >= 0).all()
    assert 0 < parts[-1].min() <= 1
