"""Speed-up, efficiency and the parts of a step: what is computed of records, what runs, and what is refused."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from mmm.errors import UserError
from mmm.examples import scaling
from mmm.examples._support import scaling_report
from mmm.examples._support.scaling_report import Point, read_point, speed_ups, table
from mmm.run.command_line import configure

LINE = ["python3", "-m", "mmm.trainer.lm", "--outdir"]
SMALL = "--preset debug --dataset random --seq_length 16 --n_layers 1 --dim 32 --ffn_dim 48 --eval_batches 1"


def point(ranks, seconds, predicted, batch=8):
    return Point(ranks, f"dp{ranks}", batch, seconds, 0.1, predicted)


def test_speed_ups():
    """Of the fewest ranks, which need not be one: strong, and weak, whose batch grows."""
    strong = [point(2, 8.0, 4.0), point(4, 5.0, 2.0), point(8, 4.0, 2.0)]
    for computed, expected in zip(speed_ups(strong), ([2, 3.2, 4], [2, 4, 4]), strict=True):
        np.testing.assert_allclose(computed, expected)
    weak = [point(1, 1.0, math.nan), point(4, 2.0, math.nan, batch=32)]
    measured, predicted = speed_ups(weak)
    np.testing.assert_allclose(measured, [1, 2])
    assert np.isnan(predicted).all()
    rows = [line.split() for line in table(strong).splitlines()]
    assert rows[2] == ["4", "1.6", "3.20", "4.00", "80%", "5.0000", "2%", "dp4,", "8"]
    assert "no prediction: the machine's rates are not known" in table(weak)


def test_a_line_for_each_point(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scaling.subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    flags = "--preset gpt2 --tp 2"
    scaling.main(configure(scaling.Config, ranks="2,8", strong=True, lines=True, outdir=tmp_path, flags=flags))
    first, second, rest = capsys.readouterr().out.splitlines()
    assert first.startswith("launch -n 2 python3 -m mmm.trainer.lm")
    assert second.startswith("launch -n 8 python3 -m mmm.trainer.lm --preset gpt2 --tp 2 --global_batch_size 32")
    assert "2, 8" in rest


def test_a_record_of_another_line_is_no_point(monkeypatch, tmp_path):
    line = [*LINE, str(tmp_path)]
    config = {"command": line, "ranks": [{}], "layout": "1", "global_batch_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(scaling_report, "state", lambda _: "running")
    assert read_point(1, line) is None
    monkeypatch.setattr(scaling_report, "state", lambda _: "finished")
    monkeypatch.setattr(scaling_report, "load", lambda _: pytest.fail("it was read"))
    assert read_point(2, line) is None
    assert read_point(1, [*LINE, "--max_iters", "3", str(tmp_path)]) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ranks": "4,2"}, "--ranks 4,2"),
        ({"ranks": "1,x"}, "--ranks 1,x"),
        ({"steps": 3}, "--steps 3"),
    ],
    ids=str,
)
def test_refused_before_anything_is_written(monkeypatch, tmp_path, flags, message):
    monkeypatch.setattr(scaling.subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    with pytest.raises(UserError, match=message):
        scaling.main(configure(scaling.Config, outdir=tmp_path / "new", **flags))
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_two_points(monkeypatch, tmp_path, capsys):
    """They run, are drawn, and are not run a second time."""
    monkeypatch.setattr(sys, "argv", ["scaling"])
    config = configure(scaling.Config, ranks="1,2", steps=5, outdir=tmp_path, flags=f"{SMALL} --device cpu")
    scaling.main(config)
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed[printed.index(" ranks  samples/s") :].splitlines()]
    assert [row[0] for row in rows[1:3]] == ["1", "2"]
    assert rows[2][-2:] == ["dp2,", "8"]
    assert {path.name for path in tmp_path.iterdir()} == {"weak-1", "weak-2", "weak.png"}
    point = read_point(2, scaling.program_line(config, 2, Path(tmp_path)))
    assert 0 <= point.waited < point.seconds
    monkeypatch.setattr(scaling.subprocess, "run", lambda *_, **__: pytest.fail("it was run again"))
    scaling.main(config)
