"""Pictures of runs: every point, marker and text is inside, and the legend names each line."""

import json

import numpy as np
import pytest

from mmm.history import History, load
from mmm.history.plots.series import limits
from mmm.history.plots.style import style
from mmm.history.plots.summary import summary_figure
from mmm.palette import STEP_PARTS
from mmm_lab.runs.curves import curves_figure
from support.pictures import flaws

N_RANKS = 4
RANKS = [{"rank": rank, "host": "node"} for rank in range(N_RANKS)]


def own_seconds(step, rank):
    """Seconds of a rank's own work: the first step takes long, step 40 hardly any time, and rank 2 is slow."""
    seconds = {0: 6.0, 40: 0.02}.get(step, 0.2)
    return seconds * 1.5 if rank == 2 else seconds


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What is hard to draw: a slow first step, a value of 0, a validation loss at both ends, rates that begin low."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps({"layout": "dp4·ep2", "module": "moe"}))
    with History(folder, ranks=RANKS) as history:
        for step in range(70):
            row = {"iter": step, "loss": 5 - 0.05 * step}
            row["mfu"] = 0.4 if step >= 3 else 0.0
            row["tps"] = 9e4 if step else 800.0
            if step == 0:
                row["val_loss"] = 1.2
            if step == 69:
                row["val_loss"] = 9.0
            own = [own_seconds(step, rank) for rank in range(N_RANKS)]
            # All ranks wait for the slowest.
            by_rank = {"dt": [max(own)] * N_RANKS, "dt_own": own}
            by_rank["dtf"] = [0.01] * N_RANKS
            by_rank["dtw"] = [0.0] * N_RANKS
            history.update(row, by_rank)
    return load(folder)


def test_a_point_or_a_name_that_is_cut_or_missing(run):
    curves = {"a": [(1, 2.0), (8, 0.0)], "b": [(1, 1.0), (8, 3.0)]}
    with style():
        assert flaws(summary_figure(run, "a run of mmm")) == []
        assert flaws(curves_figure(curves)) == []


def test_a_legend_on_the_bars_of_two_epochs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"layout": "dp4", "module": "fsdp"}))
    seconds = {"dt": 7.0, "dtd": 0.1, "dtf": 2.5, "dtb": 4.3, "dto": 0.1}
    by_rank = {name: [value] * N_RANKS for name, value in seconds.items()}
    with History(tmp_path, ranks=RANKS) as history:
        for epoch in (1, 2):
            row = {"epoch": epoch, "train_loss": 1 / epoch, "test_loss": 0.5 / epoch, "sps": 200.0}
            history.update(row, by_rank)
    with style():
        assert flaws(summary_figure(load(tmp_path), "fsdp")) == []


def test_a_head_without_the_axis_of_experts(run):
    with style():
        figure = summary_figure(run, "moe · run")
    texts = [text.get_text() for text in figure.texts]
    assert texts == ["moe · run", "70 rows · 4 ranks · 1 host · layout dp4·ep2"]


def test_a_part_with_anothers_colour_or_seconds(run):
    times = summary_figure(run, "run").axes[1]
    handles, labels = times.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    assert set(named) == {"forward", "waiting", "full step"}
    # "#rrggbb"
    digits = STEP_PARTS["dtf"][1:]
    color = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    assert list(named["forward"].get_facecolor()[:3]) == pytest.approx(color)
    # Of rank 2, for which the others wait.
    assert named["full step"].get_data().values[1] == pytest.approx(0.3)


def test_a_first_step_that_flattens_the_others(run):
    _, times, rates = summary_figure(run, "run").axes
    assert times.get_ylim()[1] < 1.0
    assert rates.get_ylim()[0] > 8e4


def test_a_row_beyond_the_axis_that_no_triangle_stands_for(run):
    _, times, rates = summary_figure(run, "run").axes
    for axes, marker in ((times, "^"), (rates, "v")):
        (triangles,) = [line for line in axes.lines if line.get_marker() == marker]
        assert triangles.get_xdata().tolist() == [0]


def test_a_row_of_one_step_among_means_over_ten(tmp_path):
    """After an evaluation a row covers one step. It was a needle in the times and rates, and so was the first step."""
    with History(tmp_path, ranks=RANKS) as history:
        for step in sorted({*range(0, 100, 10), 49, 50, 99}):
            slow = step in (0, 50)
            history.update({"iter": step, "loss": 1.0, "tps": 100.0 if slow else 900.0 + step}, {"dt": [1.0] * N_RANKS})
    with style():
        loss, time, rate = summary_figure(load(tmp_path), "a run of mmm").axes
    drawn = [*range(10, 50, 10), 49, *range(60, 100, 10), 99]
    for panel in (time, rate):
        assert panel.lines[0].get_xdata().tolist() == drawn
    assert rate.get_ylim()[0] > 800
    assert len(loss.lines[0].get_xdata()) == 12


def test_a_first_rate_that_bends_the_axis():
    """The first step is slower than any other, but not so far from them that the rule for outliers leaves it out."""
    rates = np.array([4.0, *np.linspace(5.0, 7.0, 30)])
    assert limits("tps", rates) == (5.0, 7.0)
    assert limits("loss", rates) == (4.0, 7.0)
