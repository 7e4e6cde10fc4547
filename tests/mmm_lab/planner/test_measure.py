"""``mmm machine --measure`` writes a file by which a plan can be made."""

import pytest

from mmm_lab.cli.main import main
from mmm_lab.planner import measure
from mmm_lab.planner.network import peak_rate
from mmm_launch.machines.machine import read


@pytest.mark.long
def test_a_machine_is_measured(tmp_path, monkeypatch, capsys):
    path = tmp_path / "here.json"
    monkeypatch.setattr(measure, "TRIES", 1)
    monkeypatch.setattr(measure, "ON_CPU", measure.Sizes(256, 1 << 20, 1 << 19))
    assert main(["machine", "--measure", str(path)]) == 0
    assert "written: " in capsys.readouterr().out
    machine = read(path)
    assert peak_rate(machine, "fp32") > 1e8
    assert machine.link_bandwidth > 1e6
    assert 0 < machine.link_latency < 1
    assert 0 < machine.layer_overhead < 1
    assert "measured by mmm machine --measure" in machine.sources["peak_flops"]
    assert main(["plan", "--machine", str(path), "--model", "debug", "--seq_length", "64"]) == 0


def test_where_nothing_can_be_written(tmp_path, capsys):
    assert main(["machine", "--measure", str(tmp_path)]) == 2
    assert "that is a folder" in capsys.readouterr().err
    assert main(["machine", "polaris", "--measure", str(tmp_path / "x.json")]) == 2
    assert "leave the name out" in capsys.readouterr().err
