"""A loop of one's own that ends in the middle and goes on is the one that did not: to the last bit, or on another
layout to 1e-12; and what cannot be saved is refused by its name."""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

import mmm.history
from mmm.checkpoint.manifest import read_manifest
from mmm.checkpoint.storage import Reader, read_metadata
from mmm.history.record.dataset import marks_of
from mmm.parallel import Layout
from mmm.run.options import replace_flags
from mmm.trainer import build_model, start_run
from support import own_loop
from support.own_loop import flags_of
from support.pool import program_on
from support.resuming import Ended, curve

STEPS = 6
# On which the loop of one's own resumes.
LAYOUTS = [
    pytest.param(1, {}, id="one device", marks=pytest.mark.long),
    # Keeps float32 beside float64.
    pytest.param(2, {"of_critic": "NAdam"}, id="fsdp", marks=pytest.mark.long),
    pytest.param(2, {"parallel": "ddp"}, id="ddp", marks=pytest.mark.long),
    pytest.param(2, {"parallel": "zero1"}, id="zero1"),
    pytest.param(4, {"tp": 2}, id="dp2·tp2", marks=pytest.mark.long),
    pytest.param(4, {"tp": 2, "parallel": "zero1"}, id="zero1 on dp2·tp2", marks=pytest.mark.long),
]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, full, by group and name."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict = {}
    reader = Reader(folder, read_metadata(folder, read_manifest(folder).files))
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    results = {}
    for group, named in state.items():
        for name, value in named.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            results |= {f"{group} {name} {key}".strip(): tensor for key, tensor in parts}
    return results


def stopped(run_on_ranks, ranks, folder, ends_at=4, **flags):
    """A run that has saved step 3, and ends in the step after it."""
    ended = run_on_ranks(own_loop.train, ranks, flags_of(folder, **flags), ends_at, timeout=120)
    assert ended == ["ended"] * ranks
    assert len(curve(folder)) == ends_at


def go_on(run_on_ranks, ranks, folder, **flags):
    results = run_on_ranks(own_loop.train, ranks, flags_of(folder, resume=Path("auto"), **flags), timeout=120)
    assert results == [""] * ranks


def one_record(folder):
    ds = mmm.history.load(folder)
    assert ds["iter"].values.tolist() == list(range(STEPS))
    assert [(mark["draw"], mark["step"]) for mark in marks_of(ds)] == [(3, 3)]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_to_the_last_bit(run_on_ranks, tmp_path, ranks, layout):
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert run_on_ranks(own_loop.train, ranks, flags_of(one, **layout), timeout=120) == [""] * ranks
    stopped(run_on_ranks, ranks, two, **layout)
    go_on(run_on_ranks, ranks, two, **layout)
    one_record(two)
    for name in ("loss", "lr", "tally"):
        assert curve(two, name) == curve(one, name)
    ends = [tensors(folder / "checkpoints/step-6") for folder in (one, two)]
    assert ends[0].keys() == ends[1].keys()
    assert {"generator up.weight", "critic calls", "ema up.weight", "tally total"} <= ends[0].keys()
    moment = "mu_product" if "of_critic" in layout else "momentum_buffer"
    assert {"opt_g generator.up.weight exp_avg", f"opt_d critic.up.bias {moment}"} <= ends[0].keys()
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
        assert tensor.dtype == ends[1][name].dtype, name
    states = [read_manifest(folder / "checkpoints/step-6").state for folder in (one, two)]
    assert states[0] == states[1]


@pytest.mark.long
def test_on_another_layout(run_on_ranks, tmp_path):
    """Saved on dp2·tp2, and on one device. Without what each coordinate draws for itself."""
    one = tmp_path / "one"
    grid = tmp_path / "dp2·tp2"
    assert run_on_ranks(own_loop.train, 1, flags_of(one, noise=False), timeout=120) == [""]
    stopped(run_on_ranks, 4, grid, noise=False, tp=2)
    alone = shutil.copytree(one, tmp_path / "alone")
    shutil.rmtree(alone / "checkpoints/step-6")
    expected = tensors(one / "checkpoints/step-6")
    for begun, ranks, layout in (
        (grid, 1, {}),
        (grid, 2, {"parallel": "ddp"}),
        (grid, 2, {"parallel": "zero1"}),
        (grid, 4, {"tp": 2, "parallel": "zero1"}),
        (grid, 4, {}),
        (alone, 4, {"tp": 2}),
    ):
        folder = shutil.copytree(begun, tmp_path / "goes on")
        go_on(run_on_ranks, ranks, folder, noise=False, **layout)
        one_record(folder) if begun == grid else None
        assert curve(folder) == pytest.approx(curve(one), rel=1e-12, abs=1e-13)
        results = tensors(folder / "checkpoints/step-6")
        assert results.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(results[name], tensor, rtol=1e-12, atol=1e-12)
        shutil.rmtree(folder)


def no_change(state):
    return None


def without(name, state):
    del state[name]


def also(name, value, state):
    state[name] = value


class OwnFormat(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "more": 1}


def another_optimizer(kind, state):
    state["opt_d"] = kind(state["critic"].parameters(), lr=0.1)
    del state["rate_d"]


def twice(state):
    state["again"] = state["ema"]


def with_a_function(state):
    state["tally"].by_step = {0: len}


def plain_module(state):
    """One that each rank has for itself."""
    state["head"] = torch.nn.Linear(2, 2)
    with torch.no_grad():
        state["head"].weight.fill_(torch.distributed.get_rank())


# A change of the program, and the phrase by which resuming is refused.
REFUSED = [
    (partial(without, "opt_g"), "an AdamW"),
    (partial(without, "critic"), "opt_d of run.state(…) updates a parameter of shape [8, 6]"),
    (partial(without, "rate_g"), "lacks the scheduler of opt_g's learning rate"),
    (partial(also, "seed", 3), "seed of run.state(…) is an int"),
    (partial(also, "a.b", own_loop.Tally()), "'a.b'"),
    (twice, "ema and again"),
    (partial(another_optimizer, OwnFormat), "opt_d of run.state(…) is an OwnFormat"),
    (with_a_function, "tally of run.state(…) cannot be saved: its state dict has by_step.0, a builtin_function"),
    (dict.clear, "--checkpoint_every"),
]


def refusals(rank, folder):
    """What is said to each of `REFUSED`, and whether its run has left a folder."""
    results = []
    for index, (change, _) in enumerate(REFUSED):
        message = own_loop.train(rank, flags_of(folder / f"{index}"), change=change)
        results.append((message, (folder / f"{index}").exists()))
    return results


def test_refused_before_the_first_step(run_on_ranks, tmp_path):
    (results,) = run_on_ranks(refusals, 1, tmp_path, timeout=120)
    for (refusal, left), (_, phrase) in zip(results, REFUSED, strict=True):
        assert phrase in refusal
        assert "\n" not in refusal
        assert not left


def test_what_differs_by_rank_is_refused(run_on_ranks, tmp_path):
    (message, other) = run_on_ranks(own_loop.train, 2, flags_of(tmp_path), None, plain_module, timeout=120)
    assert message == other
    assert "head.weight" in message


def count_ranks(step, state):
    state["tally"].seen = torch.distributed.get_rank()


def test_a_number_that_differs_by_rank_is_refused_where_it_is_saved(run_on_ranks, tmp_path):
    message, other = run_on_ranks(own_loop.train, 2, flags_of(tmp_path), None, no_change, count_ranks, timeout=120)
    assert message == other
    assert "tally" in message
    assert not (tmp_path / "checkpoints/step-3").exists()


def swapped(state):
    return {**state, "generator": state["critic"], "critic": state["generator"]}


# Flags, a change of the program, and the phrase by which resuming on another layout is refused.
ELSEWHERE = [
    ({}, partial(without, "ema"), "ema is EMA in the checkpoint, and missing here"),
    ({}, partial(also, "more", own_loop.Tally()), "more is missing in the checkpoint, and Tally here"),
    ({}, partial(another_optimizer, torch.optim.Adagrad), "and Adagrad here"),
    ({}, swapped, "is updated by opt_g here, and not in the checkpoint"),
    ({"frozen": True}, no_change, "generator.down.bias is updated by opt_g in the checkpoint, and not here"),
    (
        {"hidden": 16},
        no_change,
        "up.weight of generator is of shape [8, 6] in the checkpoint, and of shape [16",
    ),
    ({"global_batch_size": 4}, no_change, "its global batch has 8 samples, and this one 4"),
    ({"seed": 1}, no_change, "is of another run: --seed 0 there, 1 here"),
    ({"steps": 3}, no_change, "is of step 3, and the run has 3: no step is left"),
    ({"keep": 0}, no_change, "--keep 0"),
    ({"overwrite": True}, no_change, "--resume and --overwrite"),
    ({"steps": 4, "lr": 0.01}, no_change, ""),
]


def elsewhere(rank, folder):
    assert own_loop.train(rank, flags_of(folder / "begun", steps=3)) == ""
    results = []
    for index, (flags, change, _) in enumerate(ELSEWHERE):
        options = flags_of(folder / f"{index}", resume=folder / "begun", **flags)
        results.append(own_loop.train(rank, options, change=change))
    return results


def test_a_checkpoint_that_does_not_fit(run_on_ranks, tmp_path):
    (results,) = run_on_ranks(elsewhere, 1, tmp_path, timeout=120)
    for refusal, (_, _, phrase) in zip(results, ELSEWHERE, strict=True):
        assert phrase in refusal
        assert refusal.count("\n") == 0
        # Without a phrase it resumes.
        assert bool(refusal) == bool(phrase)
    # as it was
    begun = mmm.history.load(tmp_path / "begun")
    assert (begun.attrs["state"], begun.sizes["draw"], marks_of(begun)) == ("finished", 3, [])
    assert curve(tmp_path / f"{len(ELSEWHERE) - 1}", "lr") == [pytest.approx(0.05 * 0.9**3)]


def walk(rank, folder, ends_at=None):
    """A loop over batches that depend on what was drawn for all of those before."""

    def batches():
        place = torch.zeros(4, own_loop.WIDTH, dtype=torch.float64)
        while True:
            place = place + torch.randn_like(place)
            yield place

    flags = flags_of(folder, resume=Path("auto"), checkpoint_every=2)
    config = replace_flags(own_loop.Config(), device="cpu", dtype="fp64", global_batch_size=4, **flags)
    with program_on(rank), start_run("walk", config, Layout().fit(1)) as run:
        model = build_model(run, lambda: own_loop.Network(own_loop.WIDTH, 1), own_loop.PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.state(model=model, optimizer=optimizer)
        for step in run.steps(batches(), 4, samples=4):
            if step.index == ends_at:
                raise Ended
            loss = model(step.batch).square().mean()
            step.log(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def end_early(rank, folder):
    with suppress(Ended):
        walk(rank, folder, ends_at=3)


def test_batches_that_depend_on_those_before(run_on_ranks, tmp_path):
    """What is passed over is drawn again as it was."""
    run_on_ranks(walk, 1, tmp_path / "one")
    run_on_ranks(end_early, 1, tmp_path / "two")
    run_on_ranks(walk, 1, tmp_path / "two")
    assert len(curve(tmp_path / "two")) == 4
    assert curve(tmp_path / "two") == curve(tmp_path / "one")
