"""``mmm compare``: what differs between runs, the curves in one plot, and what is refused."""

import pytest

from mmm.errors import ConfigError, RecordError
from mmm.history import History, write_config
from mmm.palette import DARK
from mmm_lab.cli import compare as command
from mmm_lab.runs.overlay import overlaid, overlay_figure
from mmm_lab.runs.runs import read_run
from support.pictures import flaws


def made_run(folder, losses, lr=0.1, dt=36.0, metric="loss", every=1, **more):
    folder.mkdir(parents=True)
    write_config(folder, {"module": "lm", "layout": "dp2", "options": {"lr": lr, "outdir": str(folder)}} | more)
    with History(folder, ranks=[{}]) as history:
        for row, loss in enumerate(losses):
            history.update({"iter": every * row, metric: loss, "tps": 10.0, "dt": dt})
    return folder


@pytest.fixture
def two(tmp_path):
    a = made_run(tmp_path / "runs" / "a", [3.0, 2.0, 1.0], versions={"torch": "2.1", "numpy": "2"})
    b = made_run(
        tmp_path / "runs" / "b",
        [3.0, 2.5],
        0.2,
        every=4,
        versions={"torch": "2.2", "numpy": "2"},
        repository={"commit": "f0" * 20, "changed": 2},
    )
    return a, b


def test_what_differs(two, capsys):
    assert command.main([*map(str, two), "--metric", "loss"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        ["a", "a", "b", "b"],
        ["commit", "-", "f0f0f0f0f0f0", "+", "2", "changed", "files"],
        ["versions.torch", "2.1", "2.2"],
        ["--lr", "0.1", "0.2"],
    ]
    assert lines[-2:] == [["a", "a:", "1", "at", "iter", "2"], ["b", "b:", "2.5", "at", "iter", "4"]]


def test_runs_that_are_alike(tmp_path, capsys):
    runs = [str(made_run(tmp_path / name, [2.0, 2.0])) for name in "ab"]
    assert command.main(runs) == 0
    assert "nothing that is recorded differs" in capsys.readouterr().out


def test_how_far_runs_are_apart(tmp_path, capsys):
    made = {"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0, 1.0], "c": [3.0, 2.3, 1.0, 0.5], "d": [3.0]}
    assert command.main([str(made_run(tmp_path / name, losses)) for name, losses in made.items()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[2] for line in lines[-4:]] == [
        "",
        " 3 steps off a by 0e+00 at most",
        " 3 steps off a by 1e-01 at most",
        "",
    ]


def test_by_step_tokens_and_hours(two):
    runs = [read_run(folder, None) for folder in two]
    places = {by: [s.x.tolist() for s in overlaid(runs, "loss", by)] for by in ("step", "tokens", "hours")}
    assert places["step"] == [[0, 1, 2], [0, 4]]
    assert places["tokens"] == [[360, 720, 1080], [360, 1800]]  # the second row of b stands for four steps
    assert places["hours"] == [pytest.approx([0.01, 0.02, 0.03]), pytest.approx([0.01, 0.05])]


def test_rows_that_do_not_say_their_step(tmp_path, two):
    odd = made_run(tmp_path / "odd", [3.0, 2.0], every=float("nan"))
    runs = [read_run(odd, None), read_run(two[0], None)]
    with pytest.raises(RecordError, match="odd: no row that has loss says at which step it was"):
        overlaid(runs, "loss")
    assert overlaid(runs, "loss", "hours")[0].x.tolist() == pytest.approx([0.01, 0.02])


def test_pictures(two, tmp_path, capsys):
    assert command.main([*map(str, two), "--plots", str(tmp_path / "p")]) == 0
    assert {path.name for path in (tmp_path / "p").iterdir()} == {"loss.png", "loss.svg"}
    light = (tmp_path / "p" / "loss.svg").read_text()
    assert command.main([*map(str, two), "--plots", str(tmp_path / "p"), "--theme", "dark"]) == 0
    assert (DARK.paper in light, DARK.paper in (tmp_path / "p" / "loss.svg").read_text()) == (False, True)
    with pytest.raises(ConfigError, match="--theme dark without --plots"):
        command.main([*map(str, two), "--theme", "dark"])
    runs = [read_run(folder, None) for folder in two]
    names = ["short", "a/very/long/name/" * 10]
    figure = overlay_figure(overlaid(runs, "loss"), names)
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert legend.y1 <= figure.axes[0].get_window_extent().y0
    colors = [line.get_color() for line in figure.axes[0].lines]
    assert len(set(colors)) == 2
    alike = overlay_figure([*overlaid([runs[0]] * 2, "loss"), *overlaid([runs[1]], "loss")], ["a", "a", "b"])
    hidden, above, other = [line.get_linewidth() for line in alike.axes[0].lines]
    assert hidden > above == other  # it is seen beside the line that lies on it
    assert flaws(figure) == flaws(alike) == []
