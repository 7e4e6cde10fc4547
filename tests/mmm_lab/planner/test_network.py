"""Which ranks share a host, and what a collective of theirs takes. ``mmm machine --measure`` writes a file by which a
plan can be made. Memory by formula, beside the dry run of the same program: the same layouts, the trainer's own
flags."""

import importlib
from functools import partial

import pytest

from mmm.layout import Layout, Techniques
from mmm.run.command_line import parse
from mmm_lab.cli.main import main
from mmm_lab.planner import measure
from mmm_lab.planner.dry_run import dry_run
from mmm_lab.planner.named_model import read_model
from mmm_lab.planner.network import Group, collective, group_of, peak_rate
from mmm_lab.planner.predict import predict
from mmm_lab.planner.search import Search
from mmm_lab.planner.trial import Trial
from mmm_launch.host.child import run_as_main
from mmm_launch.machines.find import named
from mmm_launch.machines.machine import Machine, read
from mmm_launch.program.target import Target


def test_groups_on_hosts_of_twelve():
    machine = named({}, "aurora").changed({"hosts": 4})
    assert group_of(12, 1, machine) == Group(12, 12, False)
    # Ranks 8 … 15 are on two hosts, four on each.
    assert group_of(8, 1, machine) == Group(8, 4, True)
    assert group_of(48, 1, machine) == Group(48, 12, True)
    assert group_of(4, 12, machine) == Group(4, 1, True)
    assert group_of(2, 3, machine) == Group(2, 2, False)


# Rates by which times can be computed in the head.
MACHINE = Machine(
    name="x",
    hosts=4,
    ranks_per_host=4,
    link_bandwidth=100.0,
    link_latency=1.0,
    network_bandwidth=40.0,
    network_latency=10.0,
    link_efficiency=1.0,
    network_efficiency=1.0,
)


def test_collectives_take_latency_and_bytes():
    assert collective("all_gather", Group(4, 4, False), 400.0, MACHINE) == 3 * 1 + 0.75 * 400 / 100
    # A ring over all hosts uses the adapters of all four devices; one of a device a host its own alone.
    latency = 3 * 1 + 3 * 10
    assert collective("all_gather", Group(16, 4, True), 1600.0, MACHINE) == latency + 15 / 16 * 1600 / 40
    assert collective("all_gather", Group(4, 1, True), 400.0, MACHINE) == 3 * 10 + 0.75 * 400 / 10
    # a tree
    assert collective("all_reduce", Group(4, 1, True), 400.0, MACHINE) == 2 * 2 * 10 + 1.5 * 400 / 10
    assert collective("all_reduce", Group(1, 1, False), 400.0, MACHINE) == 0


def test_an_all_to_all_sends_a_part_inside_the_host():
    """Of 16 ranks, 4 a host: 12 sixteenths of a buffer leave by a quarter of its network; 3 go over its links."""
    latency = 3 * 1 + 3 * 10
    across = collective("all_to_all", Group(16, 4, True), 1600.0, MACHINE)
    assert across == latency + 3 / 16 * 1600 / 100 + 12 / 16 * 1600 / (40 / 4)
    assert collective("all_to_all", Group(4, 4, False), 1600.0, MACHINE) == 3 * 1 + 3 / 4 * 1600 / 100


@pytest.mark.long
def test_a_machine_is_measured(tmp_path, monkeypatch, capsys):
    path = tmp_path / "here.json"
    monkeypatch.setattr(measure, "TRIES", 1)
    monkeypatch.setattr(measure, "ON_CPU", measure.Sizes(256, 1 << 20, 1 << 19))
    assert main(["machine", "--measure", "-o", str(path)]) == 0
    assert "written: " in capsys.readouterr().out
    machine = read(path)
    assert peak_rate(machine, "fp32") > 1e8
    assert machine.link_bandwidth > 1e6
    assert 0 < machine.link_latency < 1
    assert 0 < machine.layer_overhead < 1
    assert "measured by mmm machine --measure" in machine.sources["peak_flops"]
    assert main(["plan", "--machine", str(path), "--model", "debug", "--seq-length", "64"]) == 0


def test_where_nothing_can_be_written(tmp_path, monkeypatch, capsys):
    assert main(["machine", "--measure", "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["machine", "polaris", "--measure", "-o", str(tmp_path / "x.json")]) == 2
    assert "leave the name out" in capsys.readouterr().err
    # Refused before it measures: that takes minutes.
    monkeypatch.setattr(measure, "fork_ranks", None)
    (tmp_path / "file").touch()
    assert main(["machine", "--measure", "--out", str(tmp_path / "file" / "here.json")]) == 2
    assert "no file can be written there: " in capsys.readouterr().err


LLAMA = "lm --preset debug --dataset random --seq_length 128 --batch_size 4 --dim 128 --ffn_dim 352 --n_kv_heads 4"
DEEP = f"{LLAMA} --n_layers 4 --microbatches 4"
# Ranks, and the line of a trainer.
CASES = [
    (1, LLAMA),
    (4, LLAMA),
    (4, f"{LLAMA} --parallel ddp"),
    (4, f"{LLAMA} --parallel zero1"),
    (4, f"{LLAMA} --parallel zero2"),
    (4, f"{LLAMA} --parallel zero1 --tp 2"),
    (4, f"{LLAMA} --parallel zero1 --cp 2"),
    (4, f"{LLAMA} --parallel hsdp"),
    (4, f"{LLAMA} --tp 2"),
    (2, f"{LLAMA} --tp 2 --loss_chunks 4"),
    (2, f"{LLAMA} --cp 2"),
    (2, f"{LLAMA} --activation_checkpointing full"),
    (2, f"{LLAMA} --activation_checkpointing selective"),
    (2, f"{LLAMA} --microbatches 2"),
    (2, f"{DEEP} --pp 2 --schedule GPipe"),
    (2, f"{DEEP} --pp 2 --schedule 1F1B"),
    (4, f"{DEEP} --pp 2 --tp 2"),
    (2, "vit --preset debug --dataset digits --batch_size 4"),
    (2, "vit --model swin --preset debug --dataset digits --batch_size 4"),
]
# Of the dry run: below that what is predicted may not be, above that it may not be either (full checkpointing, GPipe).
BELOW, ABOVE = 0.97, 1.13


def resolved(monkeypatch, ranks, line):
    """What the trainer decides for these flags."""
    name, *argv = line.split()
    for key, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr("sys.argv", [name, *argv, "--device", "cpu"])
    trainer = importlib.import_module(f"mmm.trainer.{name}")
    return trainer.resolve(parse(trainer.Config))


@pytest.mark.parametrize(
    ("ranks", "line"),
    [pytest.param(*case, marks=() if case == (1, LLAMA) else pytest.mark.long) for case in CASES],
    ids=lambda value: str(value).partition("n_kv_heads 4")[2] or str(value),
)
def test_memory_by_formula_is_that_of_the_dry_run(monkeypatch, ranks, line):
    predicted = predict(resolved(monkeypatch, ranks, line), "cpu", "fp32")
    name, *argv = line.split()
    monkeypatch.undo()
    traced = dry_run(partial(run_as_main, Target("module", f"mmm.trainer.{name}", (*argv, "--device", "cpu"))), ranks)
    for report in traced.ranks:
        peak = max(peak.bytes for phase, peak in report.peaks.items() if phase.startswith("step "))
        assert BELOW < sum(predicted.memory[report.coordinates["pp"]].values()) / peak < ABOVE


def test_step_times_follow_the_machine(monkeypatch):
    """Twice the rates, half the time; ranks without a core of their own take turns."""
    options = resolved(monkeypatch, 4, f"{LLAMA} --parallel ddp")
    machine = named({}, "laptop").changed({"ranks_per_host": 4, "layer_overhead": 0.0, "link_latency": 0.0})
    # All rates twice as high.
    rates = {"memory_bandwidth": 2 * machine.memory_bandwidth, "link_bandwidth": 2 * machine.link_bandwidth}
    rates["peak_flops"] = {name: 2 * rate for name, rate in machine.peak_flops.items()}
    one = predict(options, "cpu", "fp32", machine)
    assert predict(options, "cpu", "fp32", machine.changed(rates)).seconds == pytest.approx(one.seconds / 2)
    # Four ranks on two cores.
    assert predict(options, "cpu", "fp32", machine.changed({"cores": 2})).seconds == pytest.approx(2 * one.seconds)
    assert predict(options, "cpu", "fp32", machine.changed({"cores": 8})).seconds == one.seconds
    assert predict(options, "cpu", "fp32").seconds is None
    assert predict(options, "cpu", "fp32").memory == one.memory


def test_with_ddp_each_rank_updates_all_parameters():
    """On whichever axis the replicas are."""
    search = Search(read_model("llama-1b", {}, 2048), named({}, "laptop").changed({"hosts": 1}), 8, "fp32")
    for layout in (Layout(dp_shard=4), Layout(dp_replicate=4, dp_shard=1)):
        cost = search.cost.step(Trial(layout, Techniques(data_parallel="ddp"), search.one_stage, 2))
        traffic = 10 * 4 * search.spec.parameters
        assert cost.optimizer == pytest.approx(traffic / search.cost.memory_rate)
