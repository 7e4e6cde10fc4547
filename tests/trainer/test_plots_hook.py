"""A process that draws is started where there is a curve to draw."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mmm.trainer.run import plots
from mmm.trainer.run.row import Row


@pytest.mark.parametrize(
    ("iters", "draws"),
    [([], 0), ([0], 0), ([0, 1], 1), ([7], 1)],  # the last goes on with a record that has rows
)
def test_one_row_is_no_curve(monkeypatch, iters, draws):
    started = []
    monkeypatch.setattr(plots, "draws_plots", lambda run: True)
    monkeypatch.setattr(plots.subprocess, "run", lambda *a, **k: started.append(a) or SimpleNamespace(returncode=1))
    hook, run = plots.Plots(), SimpleNamespace(outdir=Path("run"))
    for number in iters:
        hook.row(run, Row({"iter": number}, 1.0, 1, 0))
    hook.end(run, None)
    assert len(started) == draws
