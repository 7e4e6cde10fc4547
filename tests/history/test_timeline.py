"""Timelines: characters stand where the boxes are, and in the picture no text lies on another."""

import json

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mmm.history import plot_timeline
from mmm.history.plots.style import style
from mmm.history.plots.timeline import Panel, Span, legend_text, timeline_figure, timeline_text

ROWS = [
    [Span("F", "0", 0, 0.0, 0.010), Span("F", "1", 0, 0.010, 0.020), Span("B", "0", 0, 0.050, 0.070)],
    [Span("F", "0", 1, 0.010, 0.030), Span("I", "0", 0, 0.030, 0.050), Span("W", "12", 0, 0.089, 0.090)],
]
PANEL = Panel("by hand", ROWS)


def test_characters():
    """90 ms on 45 columns: 2 ms each; what is too narrow for its label shows its kind alone."""
    assert timeline_text(PANEL, width=54).splitlines() == [
        "by hand",
        "rank 0   F0───F1───" + "·" * 15 + "B0━━━━━━━━" + "·" * 10,
        "rank 1   " + "·" * 5 + "f0────────I0════════" + "·" * 19 + "W",
        "         0" + f"{90.0:41.1f} ms",
    ]
    assert legend_text(PANEL) == (
        "F forward, B backward, I backward: input, W backward: weights, small letters: a rank's later stages, · idle"
    )
    assert legend_text(Panel("", [[Span("F", "0", 0, 1, 2)]])) == "F forward, · idle"


def test_picture():
    many = [[Span("FB"[i % 2], str(i), 0, i / 20, (i + 0.9) / 20) for i in range(14)] for _ in range(4)]
    with style():
        figure = timeline_figure([PANEL, Panel("wall", many)], "ZBVZeroBubble, 4 ranks, 1,024 micro-batches")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        legend = figure.legends[0].get_window_extent(renderer)
        heads = [figure.texts[0], *(axes._left_title for axes in figure.axes)]
        assert [head.get_text()[:7] for head in heads] == ["ZBVZero", "by hand", "wall"]
        assert not any(legend.overlaps(head.get_window_extent(renderer)) for head in heads)
        assert figure.bbox.contains(legend.x1, legend.y1)
        first, second = figure.axes
        assert [text.get_text() for text in first.texts] == ["0", "1", "0", "0", "0"]  # 12 has no room
        assert len(second.texts) == 56
        for axes, panel in ((first, PANEL.rows), (second, many)):
            boxes = [text.get_window_extent(renderer) for text in axes.texts]
            assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
            bars = [path for part in axes.collections[1::2] for path in part.get_paths()]
            assert len(bars) == sum(map(len, panel))
        assert first.get_xlim()[1] == pytest.approx(90)


def test_a_panel_of_another_scale_says_so():
    short, long = ([[Span("F", "0", 0, 0.0, seconds)]] for seconds in (0.5, 5.0))
    with style():
        figure = timeline_figure([Panel("a", short), Panel("b", short), Panel("c", long)], "title")
    assert [axes.get_xlabel() for axes in figure.axes] == ["ms", "ms", "ms: another scale than above"]


def test_files(tmp_path):
    written = plot_timeline([PANEL], "by hand", tmp_path, "pipeline")
    names = ["plots/mplot/pngs/pipeline.png", "plots/mplot/svgs/pipeline.svg", "plots/tplot/pipeline.txt"]
    assert sorted(str(file.relative_to(tmp_path)) for file in written) == names
    assert all(file.stat().st_size > 100 for file in written)
    assert json.loads((tmp_path / "plots" / "files.json").read_text()) == names
