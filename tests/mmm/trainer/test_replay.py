"""Steps that are computed twice (``--replay``): a bit that flips in one of the two is found, on its rank, before the
update; a run without one has the losses that it has without replays. Two deterministic runs have the same bits."""

import json
import re

import pytest
import torch

from mmm.data.text.text_data import TextData
from mmm.errors import ConfigError
from mmm.layout import Layout
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.fingerprint import as_integers
from mmm.parallel.local import to_local
from mmm.run import options as groups
from mmm.run.command_line import configure
from mmm.run.hooks.replay import Replay
from mmm.run.sharded import shard
from mmm.runtime.clock import PARTS, PIPELINE_PARTS, StepClock
from mmm.runtime.device import Precision
from mmm.runtime.ranks import Rank
from mmm.trainer.config import Mesh
from mmm.trainer.job import Job
from mmm.trainer.lm import Config
from mmm.trainer.planned import with_plan
from mmm_lab.runs.diverge import diverge
from mmm_verify.ranks.ranks import RanksFailed
from support import reference as texts
from support.loop import fit
from support.programs import run_program
from support.runs import make_run

FP32 = Precision("fp32", torch.float32, torch.float32)
SIZES = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256)
STEPS, WRONG = 3, 1
LAYER = "layers.1.feed_forward.w2.weight"


def train(rank, flags, every=1, plant=None, faulty=1, activations=None):
    """A short run. Returns its losses, and a sum of each rank's weights.

    Args:
        plant: function of the model that makes a mistake; called on the rank `faulty` in one computation of a step.
        activations: "forward" or "backward", where a block of this rank computes a wrong bit in one of the two.
    """
    sizes = flags.pop("sizes", {})
    options = Mesh(**flags)
    layout = options.fit(rank.world_size)
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**{**vars(SIZES), **sizes}))
        sample = torch.zeros(8 // layout.dp, texts.SEQ, dtype=torch.int64)
    own = Job(
        layout=layout,
        sizes=SIZES,
        model=model,
        sample=sample,
        data=TextData(texts.tokens(), texts.tokens(), {}),
        steps=STEPS,
        techniques=options.techniques(),
        optimizer="adamw",
    )
    job = with_plan(own, transformer_plan(), "fp32")
    clock = StepClock(torch.device("cpu"), PARTS if layout.pp == 1 else PIPELINE_PARTS)
    replay = Replay(every)
    run, rows = make_run(rank, groups.Run(dtype="fp32"), layout, FP32, clock=clock, hooks=[replay])
    model = shard(run, job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    computed = []
    if activations and rank.rank == faulty:
        # What the feed-forward network of the last block returns, or its gradient, has one bit flipped.
        block = unwrapped(model.modules[0]).get_submodule("layers.1.feed_forward")
        block.register_forward_hook(lambda module, inputs, y: flip_in(activations, y) if is_faulty() else None)

    def is_faulty():
        # No micro-batch of the second computation of this step has a loss yet.
        return computed.count(WRONG) == 1 and computed[-1] == WRONG

    def planted(step, loss):
        computed.append(step)
        # The second computation of this step; each has as many losses as the first.
        if plant is not None and rank.rank == faulty and step == WRONG and computed.count(step) == 2:
            plant(model)
        return loss

    for stage in map(unwrapped, model.modules.values()):
        stage.register_buffer("calls", torch.zeros(()), persistent=False)
        stage.register_forward_hook(noisy)
    before = [to_local(p.detach()).clone() for p in model.parameters()]
    try:
        fit(run, model, optimizer, job, planted=planted)
    except Exception as error:
        error.add_note(f"steps {sorted(set(computed))}")
        raise
    assert replay.replayed == (0 if every is None else STEPS // every)
    assert any((p != b).any() for p, b in zip(map(to_local, model.parameters()), before, strict=True))
    weights = [float(to_local(p).double().sum()) for p in model.parameters()]
    # In its first step a pipeline calls its stages once more, to find out shapes.
    calls = [float(stage.calls) for stage in map(unwrapped, model.modules.values()) if layout.pp == 1]
    return [row["loss"] for row in rows.rows], weights, calls


def noisy(module, inputs, output):
    """Changes what a replay has to take back: draws a number, and counts in a buffer."""
    module.calls += 1
    return output * (1 + 0.01 * torch.rand(()).item())


def flipped_gradient(model):
    """One bit of one element of a gradient, the lowest of its 23."""
    (gradient,) = (to_local(p.grad) for name, p in model.named_parameters() if name == LAYER)
    bits = as_integers(gradient).flatten()
    bits[5] ^= 1


def flip_in(where, y):
    def flipped(tensor):
        wrong = tensor.detach().clone()
        as_integers(wrong).flatten()[5] ^= 1 << 20
        return wrong

    if where == "forward":
        # The same gradient, with another value.
        return y + (flipped(y) - y).detach()
    y.register_hook(flipped)
    return None


LAYOUTS = [
    (1, {}),
    (2, {"parallel": "ddp"}),
    (2, {"pp": 2}),
    pytest.param((2, {"tpsize": 2}), marks=pytest.mark.long),
    pytest.param((2, {"microbatches": 2, "activation_checkpointing": "full"}), marks=pytest.mark.long),
    pytest.param((2, {"cp": 2}), marks=pytest.mark.long),
    pytest.param((2, {"parallel": "zero1"}), marks=pytest.mark.long),
    pytest.param((2, {"parallel": "zero2", "microbatches": 2}), marks=pytest.mark.long),
    pytest.param((2, {"ep": 2, "sizes": {"n_experts": 4, "top_k": 2, "expert_dim": 32}}), marks=pytest.mark.long),
    pytest.param((2, {"exact": "4"}), marks=pytest.mark.long),
    pytest.param((4, {"pp": 2, "tpsize": 2, "schedule": "ZBVZeroBubble"}), marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_changes_no_bit(run_on_ranks, layout):
    ranks, flags = layout
    assert run_on_ranks(train, ranks, flags) == run_on_ranks(train, ranks, flags, None)


@pytest.mark.parametrize(
    ("flags", "faulty"),
    [
        ({"parallel": "ddp"}, 1),
        ({}, 0),
        pytest.param({"tpsize": 2}, 1, marks=pytest.mark.long),
        pytest.param({"pp": 2}, 1, marks=pytest.mark.long),
    ],
)
def test_a_flipped_bit_of_a_gradient(run_on_ranks, flags, faulty):
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(train, 2, flags, 1, flipped_gradient, faulty)
    text = str(failed.value)
    assert f"step {WRONG} was computed twice from the same state, and the bits of 1 tensor differ." in text
    assert re.search(
        rf"First the gradient of {LAYER}, on rank {faulty} on \S+ \(1 of [\d,]+ elements\)\. No weight", text
    )
    # The run ended before a further step.
    assert f"steps [0, {WRONG}]" in text


@pytest.mark.parametrize(
    ("where", "first"),
    [
        ("forward", "First the output of layers.1, on rank 1 on "),
        ("backward", "Of what is not a sum over dp, first the gradient of the output of layers.0, on rank 1 on "),
    ],
)
def test_the_rank_whose_gradient_is_summed_with_others(run_on_ranks, where, first):
    """FSDP adds the wrong numbers of rank 1 to those of rank 0, and each rank holds shards of the sum."""
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(train, 2, {}, 1, None, 1, where)
    message = re.search(r"step 1 was computed twice .*?docs/replay\.md", str(failed.value)).group()
    assert first in message
    # No other rank is named with it.
    assert "rank 0" not in message.partition(first)[2]


def test_a_body_that_computes_the_batch_once(run_on_ranks):
    with pytest.raises(RanksFailed, match="the body of the loop computed step 0 once"):
        run_on_ranks(computes_once, 1)


def computes_once(rank):
    replay = Replay(1)
    run, _ = make_run(rank, groups.Run(dtype="fp32"), Layout().fit(1), FP32, hooks=[replay])
    run.objects["model"] = None
    for step in run.steps([torch.zeros(1)], 1, samples=1):
        step.log(step.batch.sum())


def command(run_on_ranks, outdir, *flags):
    small = ["--preset", "debug", "--dim", 32, "--seq_length", 32, "--max_iters", 3, "--batch_size", 4, "--no_plots"]
    result = run_program(run_on_ranks, 2, "mmm.trainer.lm", *small, "--outdir", outdir, *flags)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads((outdir / "config.json").read_text())


@pytest.mark.long
def test_two_deterministic_runs_have_the_same_bits(run_on_ranks, tmp_path):
    for name in ("a", "b"):
        _, config = command(run_on_ranks, tmp_path / name, "--deterministic", "--fingerprints", 1)
        assert config["options"]["deterministic"] is True
    result = diverge(tmp_path / "a", tmp_path / "b", 0.0)
    assert (result.step, list(result.largest)) == (None, [-1, 0, 1, 2])
    # Another batch has other bits from the first step on: the comparison is not blind.
    command(run_on_ranks, tmp_path / "c", "--deterministic", "--fingerprints", 1, "--lr", 0.0030001)
    assert diverge(tmp_path / "a", tmp_path / "c", 0.0).step == 0


@pytest.mark.long
def test_the_record_says_how_many_steps_were_replayed(run_on_ranks, tmp_path):
    log, config = command(run_on_ranks, tmp_path / "run", "--replay", 2)
    assert "replayed 1 step: the same bits both times, on every rank" in log
    assert config["replayed"] == 1
    assert "--replay 2: deterministic algorithms, as --deterministic asks for" in config["notes"]


def test_a_run_with_too_few_steps_says_so():
    run, rows = make_run(Rank(0, 1, 0, 1, "alone"), groups.Run(), Layout().fit(1), FP32)
    Replay(9).end(run, None)
    assert rows.notes == ["--replay 9: no step was replayed, since this start of the run made too few"]


def test_no_replay_on_mps():
    run, _ = make_run(Rank(0, 1, 0, 1, "alone"), groups.Run(), Layout().fit(1), FP32, device=torch.device("mps"))
    Replay(None).before(run)
    with pytest.raises(ConfigError, match="--replay 1 with --device mps"):
        Replay(1).before(run)


@pytest.mark.parametrize("value", [0, -1])
def test_a_number_of_steps_that_is_none(value):
    with pytest.raises(ConfigError, match=f"--replay {value}: it must be at least 1"):
        configure(Config, replay=value)
