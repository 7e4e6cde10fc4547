"""Pictures of runs: every point, marker and text is inside, and the legend names each line."""

import json

import pytest

from mmm.history import History, load
from mmm.history.plots.style import style
from mmm.history.plots.summary import summary_figure
from mmm.palette import STEP_PARTS
from mmm_lab.runs.curves import curves_figure
from support.pictures import flaws

RANKS = [{"rank": rank, "host": "node"} for rank in range(4)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Whatever is hard to draw: a first step that takes long, a value of 0, a loss of validation at both ends, a rank
    that is slow, rates that begin low."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps({"layout": "dp4·ep2", "module": "moe"}))
    with History(folder, ranks=RANKS) as history:
        for step in range(70):
            row = {"iter": step, "loss": 5 - 0.05 * step, "mfu": 0.4 * (step >= 3), "tps": 9e4 if step else 800.0}
            if step in (0, 69):
                row["val_loss"] = 9.0 if step else 1.2
            own = [(6.0 if step == 0 else 0.02 if step == 40 else 0.2) * (1.5 if rank == 2 else 1) for rank in range(4)]
            history.update(row, {"dt": [max(own)] * 4, "dtf": [0.01] * 4, "dtw": [0.0] * 4, "dt_own": own})
    return load(folder)


def test_nothing_is_cut_and_everything_is_named(run):
    with style():
        assert flaws(summary_figure(run, "a run of mmm")) == []
        assert flaws(curves_figure({"a": [(1, 2.0), (8, 0.0)], "b": [(1, 1.0), (8, 3.0)]})) == []


def test_the_bars_of_two_epochs_can_be_seen(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"layout": "dp4", "module": "fsdp"}))
    with History(tmp_path, ranks=RANKS) as history:
        for epoch in (1, 2):
            seconds = {"dt": [7.0] * 4, "dtd": [0.1] * 4, "dtf": [2.5] * 4, "dtb": [4.3] * 4, "dto": [0.1] * 4}
            history.update({"epoch": epoch, "train_loss": 1 / epoch, "test_loss": 0.5 / epoch, "sps": 200.0}, seconds)
    with style():
        assert flaws(summary_figure(load(tmp_path), "fsdp")) == []


def test_ep_and_what_ran(run):
    with style():
        texts = [text.get_text() for text in summary_figure(run, "moe · run").texts]
    assert texts == ["moe · run", "70 rows · 4 ranks · 1 host · layout dp4·ep2"]


def test_a_part_has_its_colour_and_its_seconds(run):
    stacked = summary_figure(run, "run").axes[1]
    named = dict(zip(*reversed(stacked.get_legend_handles_labels()), strict=True))
    assert set(named) == {"forward", "waiting", "full step"}
    color = [int(STEP_PARTS["dtf"][place : place + 2], 16) / 255 for place in (1, 3, 5)]
    assert list(named["forward"].get_facecolor()[:3]) == pytest.approx(color)
    assert named["full step"].get_data().values[1] == pytest.approx(0.3)


def test_the_first_step_does_not_flatten_the_others(run):
    _, times, rates = summary_figure(run, "run").axes
    assert times.get_ylim()[1] < 1.0
    assert rates.get_ylim()[0] > 8e4


def test_a_triangle_stands_for_a_row_beyond_the_axis(run):
    _, times, rates = summary_figure(run, "run").axes
    for axes, marker in ((times, "^"), (rates, "v")):
        (triangles,) = [line for line in axes.lines if line.get_marker() == marker]
        assert triangles.get_xdata().tolist() == [0]
