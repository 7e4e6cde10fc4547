"""Fingerprints of runs on different layouts agree, and show where a run goes wrong: step, place and rank."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmm.data.text.text_data import TextData
from mmm.errors import DivergedError, RecordError
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.optim.adamw import make_optimizer
from mmm.parallel.local import to_local
from mmm.parallel.partition import partition_model
from mmm.run import options as groups
from mmm.run.hooks.fingerprints import INTEGERS, FingerprintHook, checksum
from mmm.run.sharded import shard
from mmm.runtime.clock import PARTS, PIPELINE_PARTS, StepClock
from mmm.trainer.config import MeshFlags
from mmm.trainer.job import Job
from mmm.trainer.text import TextBatches
from mmm_lab.cli import diverge as command
from mmm_lab.runs.diverge import diverge
from mmm_verify.ranks.ranks import RanksFailed
from support import reference as texts
from support.loop import fit
from support.own_model import FP64
from support.runs import make_run

SIZES = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256)
# The step in which a mistake begins.
STEPS, WRONG = 4, 2
LAYER = "layers.1.feed_forward.w2.weight"
# Of a rank of two with `exact` 4.
MICROBATCHES = 2


def train(rank, folder, flags=None, mistake="", changes=None):
    """A run with fingerprints in `folder`, with a mistake in it."""
    settings = {"every": 1, "lr": 0.01, "max_norm": 1.0, "seed": 0, "checkpointing": "none"} | (changes or {})
    options = MeshFlags(**(flags or {}))
    layout = options.fit(rank.world_size)
    with torch.device("meta"):
        model = Transformer(SIZES)
        sample = torch.zeros(8 // layout.dp, texts.SEQ, dtype=torch.int64)
    plan = transformer_plan()
    techniques = replace(options.techniques(), checkpointing=settings["checkpointing"])
    resolved = Job(
        layout=layout,
        sizes=SIZES,
        model=model,
        sample=sample,
        plan=plan,
        partition=partition_model(model, plan, layout, techniques, sample, "fp64"),
        data=TextData(texts.tokens(), texts.tokens(), {}),
        steps=STEPS,
        techniques=techniques,
        optimizer="adamw",
    )
    clock = StepClock(torch.device("cpu"), PARTS if layout.pp == 1 else PIPELINE_PARTS)
    run, _ = make_run(rank, groups.RunFlags(dtype="fp64", seed=settings["seed"]), layout, FP64, clock=clock)
    run.folder.path = Path(folder) if rank.is_main else None
    model = shard(run, resolved)
    optimizer = make_optimizer("adamw", model.parameters(), settings["lr"], exact="exact" in (flags or {}))
    run.hooks.append(FingerprintHook(settings["every"]))
    batches = TextBatches(run, resolved, resolved.data.train, model)
    plant = PLANT.get(mistake, lambda *_: None)(rank, model, batches) or (lambda step, loss: loss)
    try:
        fit(run, model, optimizer, resolved, batches=batches, max_norm=settings["max_norm"], planted=plant)
    except DivergedError as error:
        for hook in run.hooks:
            hook.end(run, error)
        raise


def wrong_gradient(rank, model, batches):
    """Rank 1 has another gradient of one weight, as where its memory fails: its replicas do not."""

    def wrong(step, loss):
        if rank.rank == 1 and step >= WRONG:
            (gradient,) = (to_local(p.grad) for name, p in model.named_parameters() if name == LAYER)
            gradient.mul_(1.01)
        return loss

    return wrong


def wrong_bit(rank, model, batches):
    """A low bit of one element of a gradient is another one, on rank 1, after the last micro-batch of a step."""
    calls = []

    def wrong(step, loss):
        calls.append(step)
        # A bit that is changed after the first one as well can come out right in the sum.
        if rank.rank == 1 and calls.count(WRONG) == MICROBATCHES and step == WRONG:
            (gradient,) = (to_local(p.grad) for name, p in model.named_parameters() if name == LAYER)
            # The lowest bit of this lane could be rounded away, where the other lane's element is larger.
            gradient.view(INTEGERS[8])[0, 0] ^= 1 << 8
        return loss

    return wrong


def no_number(rank, model, batches):
    def wrong(step, loss):
        if step >= WRONG:
            (gradient,) = (to_local(p.grad) for name, p in model.named_parameters() if name == LAYER)
            gradient[0, 0] = float("nan")
        return loss

    return wrong


def other_samples(rank, model, batches):
    from_step = batches.from_step
    batches.from_step = lambda first: from_step(first + WRONG)


# Mistakes of one rank.
PLANT = {
    "gradient": wrong_gradient,
    "bit": wrong_bit,
    "nan": no_number,
    "samples": other_samples,
}
# On which fingerprints are those of one rank.
LAYOUTS = [
    (2, {"parallel": "ddp"}),
    (2, {"tpsize": 2}),
    (2, {"pp": 2}),
    (2, {"cp": 2}),
    pytest.param((4, {"parallel": "zero1", "tpsize": 2}), marks=pytest.mark.long),
    pytest.param((2, {"parallel": "zero2", "microbatches": 2}), marks=pytest.mark.long),
    pytest.param((8, {"parallel": "hsdp", "tpsize": 2}, {"checkpointing": "full"}), marks=pytest.mark.long),
]


@pytest.fixture
def one_rank(run_on_ranks, tmp_path_factory):
    """The folder of a run on one rank."""
    folder = tmp_path_factory.getbasetemp() / "one"
    if not folder.exists():
        folder.mkdir()
        run_on_ranks(train, 1, folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_on_any_layout_are_the_same(run_on_ranks, one_rank, tmp_path, layout):
    ranks, flags, *changes = layout
    run_on_ranks(train, ranks, tmp_path, flags, "", *changes)
    result = diverge(one_rank, tmp_path)
    assert result.step is None
    assert list(result.largest) == [-1, 0, 1, 2, 3]
    assert 0 < max(result.largest.values()) < 1e-9
    # The initial weights have the same bits on every layout; a sum in another order has not.
    bits = diverge(one_rank, tmp_path, 0.0)
    assert bits.step == 0


@pytest.mark.long
def test_exact_runs_have_the_same_bits(run_on_ranks, tmp_path):
    """Also in two and four micro-batches of a rank. A gradient that differs by rounding is seen."""
    folders = {}
    for ranks in (1, 2, 4):
        folders[ranks] = tmp_path / str(ranks)
        folders[ranks].mkdir()
        run_on_ranks(train, ranks, folders[ranks], {"exact": 4})
    for ranks in (2, 4):
        result = diverge(folders[1], folders[ranks])
        assert result.tolerance == 0.0
        assert result.step is None
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    run_on_ranks(train, 2, wrong, {"exact": 4}, "bit")
    result = diverge(folders[1], wrong)
    assert (result.step, result.entry) == (WRONG, f"gradient of {LAYER}")
    assert result.difference < 1e-12


def report(capsys, *runs):
    code = command.main([str(run) for run in runs])
    return code, capsys.readouterr().out


def test_one_ranks_gradient(run_on_ranks, one_rank, tmp_path, capsys):
    run_on_ranks(train, 4, tmp_path, {"parallel": "ddp"}, "gradient")
    result = diverge(one_rank, tmp_path)
    assert (result.step, result.entry) == (WRONG, f"gradient of {LAYER}")
    assert result.at_once
    assert "loss" in result.same
    for entry in result.likewise:
        assert entry.startswith("weight ")
    code, text = report(capsys, one_rank, tmp_path)
    assert code == 1
    assert text.startswith(f"they part at step 2, at the gradient of {LAYER}: off by ")


def test_a_run_whose_gradient_is_no_number(run_on_ranks, one_rank, tmp_path):
    with pytest.raises(RanksFailed, match="DivergedError"):
        run_on_ranks(train, 1, tmp_path, {}, "nan")
    result = diverge(one_rank, tmp_path)
    assert (result.step, result.entry) == (WRONG, f"gradient of {LAYER}")


def test_the_rank_where_the_layouts_are_the_same(run_on_ranks, tmp_path):
    folders = [tmp_path / "right", tmp_path / "wrong"]
    for folder, mistake in zip(folders, ("", "gradient"), strict=True):
        folder.mkdir()
        run_on_ranks(train, 2, folder, {"tpsize": 2}, mistake)
    result = diverge(*folders)
    assert (result.step, result.entry) == (WRONG, f"gradient of {LAYER}")
    assert result.ranks == "rank 1 of the ranks 0, 1 that hold a part of it"


@pytest.mark.parametrize(
    ("mistake", "changes", "step", "entry"),
    [
        ("", {"seed": 3}, -1, "weight tok_embeddings.weight"),
        ("samples", {}, 0, "the batch's inputs"),
        ("", {"lr": 0.02}, 0, "weight tok_embeddings.weight"),
        # Gradients are taken before they are clipped.
        ("", {"max_norm": 0.1}, 0, "weight tok_embeddings.weight"),
    ],
)
def test_what_is_other(run_on_ranks, one_rank, tmp_path, mistake, changes, step, entry):
    run_on_ranks(train, 1, tmp_path, {}, mistake, changes)
    result = diverge(one_rank, tmp_path)
    assert (result.step, result.entry) == (step, entry)


def test_every_second_step_and_a_file_that_was_cut_off(run_on_ranks, one_rank, tmp_path):
    run_on_ranks(train, 1, tmp_path, {}, "", {"every": 2})
    assert list(diverge(one_rank, tmp_path).largest) == [-1, 0, 2]
    (file,) = tmp_path.glob("fingerprints-*.jsonl")
    file.write_bytes(file.read_bytes()[:-5])
    assert list(diverge(one_rank, tmp_path).largest) == [-1, 0]


def test_what_cannot_be_compared(one_rank, tmp_path):
    with pytest.raises(RecordError, match="no run's record"):
        diverge(one_rank, tmp_path)
    file = tmp_path / "fingerprints-0.jsonl"
    for content in ("", "{}\n", '{"layout": "1", "dtype": "fp64", "ranks": 1, "replicas": {}}\n{"step": 0}\n'):
        file.write_text(content)
        with pytest.raises(RecordError, match="is not a file of fingerprints"):
            diverge(one_rank, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_each_bit_changes_the_checksum_and_shards_add_up(dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = (100 * torch.randn(6, 5, generator=generator)).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor[:2]) + checksum(tensor[2:]) == before
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    element = real.view(INTEGERS[real.element_size()]).view(-1)[7:8]
    for bit in range(8 * real.element_size()):
        mask = torch.ones((), dtype=element.dtype) << bit
        element ^= mask
        assert checksum(tensor) != before, bit
        element ^= mask


def test_rounding_that_cancels_in_a_sum_of_bits_changes_the_checksum():
    """One element is a bit larger and another a bit smaller."""
    tensor = torch.tensor([1.5, 2.7])
    rounded = tensor.clone()
    bits = rounded.view(torch.int32)
    bits[0] += 1
    bits[1] -= 1
    assert checksum(rounded) != checksum(tensor)
