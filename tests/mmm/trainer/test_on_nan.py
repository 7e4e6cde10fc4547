"""A gradient or a loss that is not finite on one rank: every rank of any layout stops, or skips the step."""

import math
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from mmm.data.text.text_data import TextData
from mmm.errors import DivergedError
from mmm.layout import Techniques
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.nn.experts import MixtureOfExperts
from mmm.optim.adamw import make_optimizer
from mmm.parallel import Layout, build_mesh
from mmm.parallel.local import to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.run import options as groups
from mmm.runtime.clock import StepClock
from mmm.runtime.device import Precision
from mmm.trainer.job import Job
from support import reference as texts
from support.loop import fit
from support.runs import make_run

CPU = torch.device("cpu")
# Without and with experts, whose bias a skipped step must not move.
DENSE = TransformerConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256)
EXPERTS = TransformerConfig(dim=16, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=256, n_experts=4, expert_dim=8)
# The step and the rank.
STEPS, BAD, WHO = 3, 1, 1


@dataclass(frozen=True)
class Flags:
    lr: float = 0.01
    run: groups.RunFlags = groups.RunFlags()


def train(rank, layout, kind, mode, planted, optimizer="adamw", max_norm=1.0, by_epoch=False, steps=STEPS):
    """A run in float64: what it raises, its weights, optimizer's state and biases, its rows and notes.

    Args:
        mode: stop, skip, or "leave out": nothing is planted, and the step of the optimizer is not done.
        planted: gradient, loss, or nothing; always: gradients from `BAD` on.
    """
    experts = layout.ep > 1
    precision = Precision("fp64", torch.float64, torch.float64)
    with torch.device("meta"):
        full = Transformer(EXPERTS if experts else DENSE)
        sample = torch.zeros(texts.GLOBAL_BATCH // layout.dp, texts.SEQ, dtype=torch.int64)
    options = Flags()
    data = TextData(texts.tokens(), texts.tokens(), {})
    sizes = EXPERTS if experts else DENSE
    plan = transformer_plan()
    techniques = Techniques(data_parallel=kind)
    resolved = Job(
        layout=layout,
        sizes=sizes,
        model=full,
        sample=sample,
        plan=plan,
        partition=partition_model(full, plan, layout, techniques, sample),
        data=data,
        steps=steps,
        techniques=techniques,
        optimizer="adamw",
    )
    clock = StepClock(CPU)
    mesh = build_mesh(layout, "cpu", experts=experts)
    model = ParallelModel(
        full,
        resolved.plan,
        mesh,
        precision,
        resolved.techniques,
        resolved.partition,
        device=CPU,
        seed=0,
    )
    if optimizer == "not fused":
        made = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        made = make_optimizer(optimizer, model.parameters(), 0.01)

    def plant(step, loss):
        if rank.rank == WHO and (step == BAD or (planted == "always" and step > BAD)):
            if planted == "loss":
                return torch.full_like(loss, math.inf)
            if planted != "nothing":
                grads = [p.grad for p in model.parameters() if p.grad is not None and to_local(p.grad).numel()]
                to_local(grads[-1]).view(-1)[-1] = math.nan
        return loss

    update = None
    if mode == "leave out":
        balance = model.balance_experts
        left_out = []

        def update(step):
            left_out[:] = [step == BAD]
            if step != BAD:
                made.step()

        model.balance_experts = lambda rate, due: balance(0.0 if left_out[0] else rate, due)
    run, record = make_run(rank, options, layout, precision, clock=clock)
    epoch = 2 if by_epoch else None
    skips = mode == "skip"
    messages = []
    try:
        with patch("mmm.run.rows.socket.gethostname", lambda: f"node{rank.rank}"):
            fit(
                run,
                model,
                made,
                resolved,
                max_norm=max_norm,
                skips=skips,
                epoch=epoch,
                balance_rate=0.125,
                planted=plant,
                update=update,
            )
    except DivergedError as error:
        messages = [str(error)] * error.on_every_rank
    modules = [module for stage in model.modules.values() for module in stage.modules()]
    values = [to_local(p).detach().clone() for p in model.parameters()]
    values += [to_local(value).clone() for of_one in made.state.values() for value in of_one.values()]
    values += [module.expert_bias for module in modules if isinstance(module, MixtureOfExperts)]
    return "".join(messages), values, record.kept, record.notes


LAYOUTS = [
    pytest.param(Layout(dp_shard=2, tp=2), "fsdp", marks=pytest.mark.long),
    pytest.param(Layout(pp=2, dp_shard=2), "fsdp", marks=pytest.mark.long),
    (Layout(dp_shard=2), "zero2"),
    (Layout(dp_shard=2), "ddp"),
    pytest.param(Layout(dp_shard=4, ep=2), "fsdp", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS, ids=str)
def test_a_step_is_skipped_on_every_rank(run_on_ranks, layout, kind):
    """The weights, the optimizer's state and the biases are bit for bit those of a run that leaves the step out."""
    got = run_on_ranks(train, layout.ranks, layout, kind, "skip", "gradient")
    expected = run_on_ranks(train, layout.ranks, layout, kind, "leave out", "nothing")
    for (messages, values, rows, notes), (_, others, others_rows, _) in zip(got, expected, strict=True):
        assert messages == ""
        for one, other in zip(values, others, strict=True):
            assert torch.equal(one, other)
        assert [row["loss"] for row in rows] == [row["loss"] for row in others_rows]
        assert [row["skipped"] for row in rows] == [0, 1, 0]
        (note,) = notes
        assert note.startswith("the gradient of ")
        assert f" is not finite at step {BAD}, on rank {WHO} on node{WHO}: all ranks have skipped the step" in note
    assert len({note for *_, (note,) in got}) == 1


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("not fused", marks=pytest.mark.long)])
@pytest.mark.parametrize("planted", [pytest.param("loss", marks=pytest.mark.long), "gradient"])
def test_an_infinite_loss_and_other_optimizers(run_on_ranks, optimizer, planted):
    case = (Layout(dp_shard=2), "fsdp")
    got = run_on_ranks(train, 2, *case, "skip", planted, optimizer, 0.0)
    expected = run_on_ranks(train, 2, *case, "leave out", "nothing", optimizer, 0.0)
    for (_, values, rows, _), (_, others, _, _) in zip(got, expected, strict=True):
        for one, other in zip(values, others, strict=True):
            assert torch.equal(one, other)
        assert math.isfinite(rows[BAD]["loss"]) is (planted == "gradient")


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize(("layout", "kind"), [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_otherwise_the_run_ends_and_says_where(run_on_ranks, layout, kind, max_norm):
    for messages, *_ in run_on_ranks(train, layout.ranks, layout, kind, "stop", "gradient", "adamw", max_norm):
        assert f"step {BAD}, on rank {WHO} on node{WHO}" in messages


def test_an_epoch_with_a_step_that_is_skipped(run_on_ranks):
    """One row for the steps 0 and 1: its loss is that of step 0."""
    ((_, _, rows, _), _) = run_on_ranks(train, 2, Layout(dp_shard=2), "fsdp", "skip", "loss", "adamw", 1.0, True)
    ((_, _, steps, _), _) = run_on_ranks(train, 2, Layout(dp_shard=2), "fsdp", "skip", "loss", "adamw", 1.0)
    assert [row["skipped"] for row in rows] == [1, 0]
    assert rows[0]["train_loss"] == steps[0]["loss"]
    ((messages, *_), _) = run_on_ranks(train, 2, Layout(dp_shard=2), "fsdp", "stop", "loss", "adamw", 1.0, True)
    assert "epoch 1 step 1, from rank 1 on node1" in messages


def test_too_many_in_a_row(run_on_ranks):
    for messages, _, rows, notes in run_on_ranks(
        train, 2, Layout(dp_shard=2), "fsdp", "skip", "always", "sgd", 1.0, False, 40
    ):
        assert "20 steps in a row" in messages
        assert len(rows) == BAD + 20
        assert len(notes) == 1
