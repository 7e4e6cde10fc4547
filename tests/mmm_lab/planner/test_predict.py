"""Memory by formula, beside the dry run of the same program: the same layouts, the trainer's own flags."""

import importlib
from functools import partial

import pytest

from mmm.run.command_line import parse
from mmm_lab.planner.dry_run import dry_run
from mmm_lab.planner.predict import predict
from mmm_launch.host.child import run_as_main
from mmm_launch.machines.find import named
from mmm_launch.program.target import Target

LLAMA = "lm --preset debug --dataset random --seq_length 128 --batch_size 4 --dim 128 --ffn_dim 352 --n_kv_heads 4"
DEEP = f"{LLAMA} --n_layers 4 --microbatches 4"
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
]
# Of the dry run: below that what is predicted may not be, above that it may not be either (full checkpointing, GPipe).
BELOW, ABOVE = 0.97, 1.13


def resolved(monkeypatch, ranks, line):
    """What the trainer decides for these flags."""
    name, *words = line.split()
    for key, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr("sys.argv", [name, *words, "--device", "cpu"])
    trainer = importlib.import_module(f"mmm.trainer.{name}")
    return trainer.resolve(parse(trainer.Config))


@pytest.mark.parametrize(
    ("ranks", "line"),
    [pytest.param(*case, marks=() if case == (1, LLAMA) else pytest.mark.long) for case in CASES],
    ids=lambda value: str(value).partition("n_kv_heads 4")[2] or str(value),
)
def test_memory_by_formula_is_that_of_the_dry_run(monkeypatch, ranks, line):
    predicted = predict(resolved(monkeypatch, ranks, line), "cpu", "fp32")
    name, *words = line.split()
    monkeypatch.undo()
    found = dry_run(partial(run_as_main, Target("module", f"mmm.trainer.{name}", (*words, "--device", "cpu"))), ranks)
    for report in found.ranks:
        peak = max(peak.bytes for phase, peak in report.peaks.items() if phase.startswith("step "))
        assert BELOW < predicted.bytes(report.coordinates["pp"]) / peak < ABOVE


def test_step_times_follow_the_machine(monkeypatch):
    """Twice the rates, half the time; ranks without a core of their own take turns."""
    what = resolved(monkeypatch, 4, f"{LLAMA} --parallel ddp")
    machine = named({}, "laptop").changed({"ranks_per_host": 4, "layer_overhead": 0.0, "link_latency": 0.0})
    rates = {"memory_bandwidth": 2 * machine.memory_bandwidth, "link_bandwidth": 2 * machine.link_bandwidth}
    rates["peak_flops"] = {name: 2 * rate for name, rate in machine.peak_flops.items()}
    one = predict(what, "cpu", "fp32", machine)
    assert predict(what, "cpu", "fp32", machine.changed(rates)).seconds == pytest.approx(one.seconds / 2)
    assert predict(what, "cpu", "fp32", machine.changed({"cores": 2})).seconds == pytest.approx(2 * one.seconds)
    assert predict(what, "cpu", "fp32", machine.changed({"cores": 8})).seconds == one.seconds
    assert predict(what, "cpu", "fp32").seconds is None
    assert predict(what, "cpu", "fp32").memory == one.memory
