"""A process that draws is started where there is a curve to draw."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mmm.trainer.run import record
from mmm.trainer.run.rows import Row


@pytest.mark.parametrize(
    ("iters", "draws"),
    [([], 0), ([0], 0), ([0, 1], 1), ([7], 1)],  # the last goes on with a record that has rows
)
def test_one_row_is_no_curve(monkeypatch, iters, draws):
    started = []
    monkeypatch.setattr(record, "draws_plots", lambda run: True)
    monkeypatch.setattr(record.subprocess, "run", lambda *a, **k: started.append(a) or SimpleNamespace(returncode=1))
    hook, run = record.Record(), SimpleNamespace(outdir=Path("run"))
    for number in iters:
        hook.row(run, Row({"iter": number}, 1.0, 1, 0))
    hook.end(run, None)
    assert len(started) == draws
