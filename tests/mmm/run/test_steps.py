"""One rank's loop by `Run.steps`: what its rows have, what may stand around it, and which flags may change."""

import itertools
import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import mmm.history
from mmm.errors import ConfigError, DataError, DivergedError
from mmm.parallel import Layout
from mmm.run.command_line import configure
from mmm.run.state import State
from mmm.trainer import start_run
from support.own_loop import Config
from support.resuming import curve


@contextmanager
def small_run(folder, **flags):
    config = configure(Config, device="cpu", dtype="fp64", outdir=folder, **flags)
    with start_run("small", config, Layout().fit(1)) as run:
        yield run, config


@pytest.fixture(autouse=True)
def no_group_stays():
    yield
    # Of a run that was refused.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def network():
    torch.manual_seed(0)
    return nn.Linear(4, 1, dtype=torch.float64)


def batches(steps):
    return list(torch.randn(steps, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def train(run, model, optimizer, steps):
    for step in run.steps(batches(steps), steps, samples=8):
        loss = model(step.batch).square().mean()
        step.log(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def run_all(folder, steps, change=lambda step, optimizer: None, **flags):
    with small_run(folder, **flags) as (run, config):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        run.state(model=model, optimizer=optimizer)
        for step in train(run, model, optimizer, steps):
            change(step, optimizer)


class FromStep:
    """Batches that begin at any step, and errors that are values, as `mmm.data.arrays` hands them over."""

    def from_step(self, first):
        # float32, and the weights are float64.
        yield [torch.ones(8, 4, dtype=torch.float32) * first]
        yield DataError("sample 3 has a NaN")


def test_batches_that_begin_at_a_step_are_moved_to_the_device(tmp_path):
    """They get the dtype of the weights, as those of any iterable do, and an error that is a value is raised."""
    with small_run(tmp_path) as (run, _):
        run.first = 2
        steps = run.steps(FromStep(), 4, samples=8)
        step = next(steps)
        (batch,) = step.batch
        assert (batch.dtype, batch[0, 0].item()) == (torch.float64, 2.0)
        step.log(batch.sum())
        with pytest.raises(DataError, match="sample 3 has a NaN"):
            next(steps)


def test_a_flag_may_change_where_a_run_goes_on(tmp_path):
    """The learning rate is the new flag's, and the rest is as it was."""
    run_all(tmp_path / "begun", 2, checkpoint_every=2, lr=0.1)
    run_all(tmp_path / "two", 4, resume=tmp_path / "begun", lr=0.01)

    def lower(step, optimizer):
        if step.index == 1:
            optimizer.param_groups[0]["lr"] = 0.01

    run_all(tmp_path / "one", 4, lower, lr=0.1)
    # Steps 2 and 3.
    assert curve(tmp_path / "two", "lr") == [0.01, 0.01]
    assert curve(tmp_path / "two") == curve(tmp_path / "one")[2:]


def test_what_the_loop_has_changed_is_as_saved(tmp_path):
    def halve(step, optimizer):
        optimizer.param_groups[0]["lr"] /= 2

    run_all(tmp_path / "begun", 2, halve, checkpoint_every=2, lr=0.1)
    run_all(tmp_path / "two", 4, halve, resume=tmp_path / "begun", lr=0.01)
    assert curve(tmp_path / "two", "lr") == [0.025, 0.0125]


def test_a_tracker_gets_the_rows_of_a_script_of_ones_own(tmp_path, monkeypatch):
    """Only the trainers had the flag."""
    wandb = MagicMock()
    wandb.init.return_value.step = 0
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    # It is installed.
    monkeypatch.setattr("mmm.history.record.trackers.find_spec", lambda package: package)
    run_all(tmp_path, 3, tracker="wandb")
    losses = [call.args[0]["loss"] for call in wandb.init.return_value.log.call_args_list]
    assert losses == curve(tmp_path)
    wandb.init.return_value.finish.assert_called_once_with(exit_code=0)


def test_the_log_of_a_script_of_ones_own_says_of_how_many_steps_it_is(tmp_path):
    """Only a trainer knows its steps before its loop. The flag --steps says 9, and the loop makes 4."""
    with small_run(tmp_path, steps=9, checkpoint_every=2) as (run, _):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.state(model=model, optimizer=optimizer)
        list(train(run, model, optimizer, 4))
    log = (tmp_path / "log.txt").read_text()
    assert [f"iter={step}/4" in log for step in range(4)] == [True] * 4
    # The pace is known from the second row on, and after the last nothing is left.
    assert log.count(" left=") == 2
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 4
    (line,) = [line for line in log.splitlines() if "to continue" in line]
    assert f"--outdir {tmp_path} --resume auto" in line
    assert f"mmm history {tmp_path} --plots" in log


class Padded:
    """A batch of which some targets are padding: its count is on the device."""

    def __init__(self, count):
        self.count = torch.tensor(count)


def train_padded(folder, counts):
    with small_run(folder) as (run, _):
        for step in run.steps(map(Padded, counts), len(counts), samples=8):
            losses = torch.ones(int(step.count), dtype=torch.float64)
            step.log(losses.sum() / step.count)


def test_a_batch_without_targets_is_told_as_such(tmp_path):
    """It would be told as a loss that diverges: the mean over no targets is 0/0. Here step 1 has none."""
    with pytest.raises(DataError, match=r"no token .* step 1 has a target"):
        train_padded(tmp_path, [3, 0, 3])


def test_further_values_of_a_row(tmp_path):
    """By keywords of `step.log`, which took none; a tensor may still have its graph, as a part of the loss has."""
    with small_run(tmp_path) as (run, _):
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        for step in run.steps(batches(2), 2, samples=8):
            fit = weight * (step.index + 1)
            step.log(fit + 1, fit=fit, beta=0.5)
            step.row["after"] = fit - 1
    assert curve(tmp_path, "fit") == [1.0, 2.0]
    assert curve(tmp_path, "beta") == [0.5, 0.5]
    assert curve(tmp_path, "after") == [0.0, 1.0]


class Gradient:
    """A model whose only gradient has this norm."""

    def __init__(self, norm):
        self.norm = norm

    def gradient_norms(self):
        return ["weight"], [torch.tensor(self.norm, dtype=torch.float64)]


@pytest.mark.parametrize("wrong", ["loss", "gradient", "skipped"])
def test_weights_that_are_not_finite_are_not_saved_in_the_middle_of_an_epoch(tmp_path, wrong):
    """Only the row looked, at the epoch's end, so checkpoints before it had NaN. Step 1 of an epoch of four is wrong
    here, and step-2 would be saved. A step that was skipped has changed nothing."""

    def train_epoch():
        with small_run(tmp_path, checkpoint_every=2) as (run, _):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.state(model=model, optimizer=optimizer)
            for step in run.steps(batches(4), 4, samples=8, epoch=4):
                factor = math.nan if step.index == 1 else 1.0
                step.log(torch.tensor(factor if wrong == "loss" else 1.0, dtype=torch.float64))
                if wrong != "loss":
                    step.check(Gradient(factor), skips=wrong == "skipped")

    if wrong == "skipped":
        train_epoch()
    else:
        with pytest.raises(DivergedError, match=rf"{wrong} .*(is nan|step 1)"):
            train_epoch()
    saved = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert saved == ({"step-2", "step-4"} if wrong == "skipped" else set())


def loop_twice(folder):
    with small_run(folder, checkpoint_every=2) as (run, _):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.state(model=model, optimizer=optimizer)
        for _ in range(2):
            list(train(run, model, optimizer, 2))


def test_a_second_loop_cannot_be_saved(tmp_path):
    with pytest.raises(ConfigError, match="--checkpoint_every"):
        loop_twice(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def say_twice(folder):
    with small_run(folder, checkpoint_every=2) as (run, _):
        model = network()
        run.state(model=model)
        run.state(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_state_is_said_once(tmp_path):
    with pytest.raises(ConfigError, match="second"):
        say_twice(tmp_path)


class Both:
    """An object of one's own, which saves the optimizers that it has."""

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)

    def state_dict(self):
        return {"steps": [len(optimizer.state) for optimizer in self.optimizers]}

    def load_state_dict(self, state):
        pass


def test_an_optimizer_may_be_in_an_object_of_ones_own(tmp_path):
    with small_run(tmp_path, checkpoint_every=2) as (run, _):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.state(model=model, both=Both(optimizer))
        list(train(run, model, optimizer, 2))
    assert (tmp_path / "checkpoints/step-2").exists()


def test_the_rate_of_a_row_is_that_of_the_first_optimizer(tmp_path):
    with small_run(tmp_path) as (run, _):
        model = network()
        first = torch.optim.SGD([model.weight], lr=0.1)
        second = torch.optim.SGD([model.bias], lr=0.2)
        run.state(model=model, first=first, second=second)
        for step in run.steps(batches(4), 4, samples=8):
            loss = model(step.batch).square().mean()
            step.log(loss)
            loss.backward()
            if step.index % 2:
                first.step()
                first.param_groups[0]["lr"] /= 2
            second.step()
    assert curve(tmp_path, "lr") == [0.1, 0.1, 0.05, 0.05]


def test_an_evaluation_counts_for_no_step(tmp_path, monkeypatch):
    """Before the first step, in the loop, and after it."""
    seconds = itertools.count()
    late = [0]
    monkeypatch.setattr("mmm.runtime.clock.perf_counter", lambda: next(seconds) + late[0])

    def evaluate(run, model):
        with run.evaluating(model):
            assert not model.training
            late[0] += 1000
            mean = run.mean_loss(model(batch).square().mean() for batch in run.read(batches(2)))
        assert model.training
        return mean

    with small_run(tmp_path) as (run, _):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.state(model=model, optimizer=optimizer)
        before = evaluate(run, model)
        for step in train(run, model, optimizer, 3):
            step.row["test_loss"] = evaluate(run, model)
        after = evaluate(run, model)
    rows = mmm.history.load(tmp_path)
    with torch.no_grad():
        expected = sum(network()(batch).square().mean().item() for batch in batches(2)) / 2
    assert before == pytest.approx(expected, rel=1e-12)
    assert rows.test_loss.values[-1] == after < before
    assert rows.dt.max() < 100


def test_a_resumed_run_keeps_the_notes_and_samples_of_the_part_before(tmp_path):
    def go_on(steps, note):
        with small_run(tmp_path, checkpoint_every=2, resume=Path("auto")) as (run, _):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.state(model=model, optimizer=optimizer)
            run.note(note)
            for step in train(run, model, optimizer, steps):
                run.describe(samples=[*run.facts.get("samples", []), {"iter": step.index, "text": note}])

    go_on(2, "a first part")
    config = json.loads((tmp_path / "config.json").read_text())
    # As of a part that was killed one step after its checkpoint: that step is made again.
    config["samples"].append({"iter": 2, "text": "a first part"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    go_on(4, "a second part")
    config = json.loads((tmp_path / "config.json").read_text())
    assert [(sample["iter"], sample["text"]) for sample in config["samples"]] == [
        (0, "a first part"),
        (1, "a first part"),
        (2, "a second part"),
        (3, "a second part"),
    ]
    assert [note for note in config["notes"] if note.endswith("part")] == ["a first part", "a second part"]


@pytest.mark.parametrize("saves", [False, True], ids=["at the next step", "at the save"])
def test_a_group_that_is_added_later_is_refused(tmp_path, saves):
    """A resumed run would not have it when it loads the checkpoint."""
    with pytest.raises(ConfigError, match=r"optimizer .* 2 groups .* had 1 .* add_param_group"):
        add_a_group(tmp_path, every=1 if saves else 4)


def test_a_parameter_that_is_put_into_a_group_later_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"optimizer .* parameter of shape \(3,\)"):
        put_a_parameter(tmp_path)


def put_a_parameter(folder):
    with small_run(folder, checkpoint_every=4) as (run, _):
        model = network()
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        run.state(model=model, optimizer=optimizer)
        for step in train(run, model, optimizer, 4):
            if step.index == 0:
                optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(3)))


def add_a_group(folder, every):
    with small_run(folder, checkpoint_every=every) as (run, _):
        model = network()
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        run.state(model=model, optimizer=optimizer)
        for step in train(run, model, optimizer, 4):
            if step.index == 0:
                optimizer.add_param_group({"params": [model.bias]})


class Checked:
    """What `Step.check` needs of a model."""

    def __init__(self, model):
        self.model = model

    def gradient_norms(self):
        return ["weight"], [self.model.weight.grad.norm()]


def loop_without_checks(folder, last_loss=1.0):
    with small_run(folder) as (run, _):
        model = network()
        for step in run.steps(batches(2), 2, samples=8):
            loss = model(step.batch).square().mean()
            step.log(loss)
            loss.backward()
            step.check(Checked(model))
        for step in run.steps(batches(2), 2, samples=8):
            loss = model(step.batch).square().mean()
            step.log(loss * last_loss if step.last else loss)


def test_a_loop_need_not_check_what_a_loop_before_it_has_checked(tmp_path):
    loop_without_checks(tmp_path)
    losses = curve(tmp_path)
    assert losses[:2] == losses[2:]


def test_such_a_loop_sees_a_loss_that_is_not_finite(tmp_path):
    with pytest.raises(DivergedError, match="the loss is nan at step 1"):
        loop_without_checks(tmp_path, last_loss=math.nan)


def test_names_of_parameters_are_made_once(monkeypatch):
    calls = []
    make = State.names_of_parameters
    monkeypatch.setattr(State, "names_of_parameters", lambda state: calls.append(state) or make(state))
    model = network()
    state = State({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert state.describe() == state.describe()
    assert len(calls) == 1
