"""Timelines: characters stand where the boxes are, and in the picture no text lies on another."""

import json

from mmm.history import plot_timeline
from mmm.history.plots.timeline import Panel, Span, legend_text, timeline_text

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


def test_files(tmp_path):
    written = plot_timeline([PANEL], "by hand", tmp_path, "pipeline")
    names = ["plots/mplot/pngs/pipeline.png", "plots/mplot/svgs/pipeline.svg", "plots/tplot/pipeline.txt"]
    assert sorted(str(file.relative_to(tmp_path)) for file in written) == names
    assert all(file.stat().st_size > 100 for file in written)
    assert json.loads((tmp_path / "plots" / "files.json").read_text()) == names
