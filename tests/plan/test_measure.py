"""``mmm machine --measure`` writes a file by which a plan can be made."""

import pytest
import torch

from mmm.cli.main import main
from mmm.machines.machine import parse, read
from mmm.plan import measure
from mmm.plan.network import peak_rate


@pytest.mark.long
@pytest.mark.parametrize("command", [["machine", "--measure"], ["plan", "--calibrate"]], ids=" ".join)
def test_a_machine_is_measured(tmp_path, monkeypatch, capsys, command):
    path = tmp_path / "here.json"
    monkeypatch.setattr(measure, "TRIES", 1)
    monkeypatch.setattr(measure, "ON_CPU", measure.Sizes(256, 1 << 20, 1 << 19))
    assert main([*command, str(path)]) == 0
    captured = capsys.readouterr()
    assert "written: " in captured.out
    assert ("--calibrate is now mmm machine --measure" in captured.err) == (command[0] == "plan")
    machine = read(path)
    assert peak_rate(machine, "fp32") > 1e8
    assert machine.link_bandwidth > 1e6
    assert 0 < machine.link_latency < 1
    assert 0 < machine.layer_overhead < 1
    assert "measured by mmm machine --measure" in machine.sources["peak_flops"]
    assert main(["plan", "--machine", str(path), "--model", "debug", "--seq_length", "64"]) == 0


RATES = {"peak_flops": {"bf16": 8e14}, "memory_bandwidth": 4e12, "layer_overhead": 5e-4, "tensor_overhead": 3e-3}


def test_one_accelerator_has_no_link(monkeypatch):
    """And its products are not taken for as fast as the largest."""
    monkeypatch.setattr(measure, "device_memory", lambda device: 80e9)
    machine = parse(measure.machine_data(torch.device("cuda"), 1, RATES | measure.link_rates({}, 1)), "test")
    assert machine.missing() == []
    assert machine.link_bandwidth == 0
    assert machine.matmul_efficiency == 0.75
    assert machine.memory_efficiency == 1
    assert machine.cores == 0
    assert "link_bandwidth" not in machine.sources


def test_rates_of_a_link():
    """Of 1,000 elements of 4 bytes a rank sends as many bytes in an all-reduce of two, and in an all-gather to two."""
    seconds = {"all_gather small": 1e-3, "all_gather large": 2e-3, "all_reduce small": 1e-3, "all_reduce large": 3e-3}
    rates = measure.link_rates(seconds, 1000)
    assert rates == {"link_bandwidth": pytest.approx((4e6 + 2e6) / 2), "link_latency": 1e-3}


def test_where_nothing_can_be_written(tmp_path, capsys):
    assert main(["machine", "--measure", str(tmp_path)]) == 2
    assert "that is a folder" in capsys.readouterr().err
    assert main(["machine", "polaris", "--measure", str(tmp_path / "x.json")]) == 2
    assert "leave the name out" in capsys.readouterr().err
