"""The bubble: replays of lists whose bubble is known, every schedule against its formula, and what real ranks did."""

import itertools

import pytest
import torch
from torch.distributed.pipelining import schedules

from mmm.errors import LayoutError
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import Layout, build_mesh, cross_entropy, materialize, parallelize
from mmm.parallel.pp.bubble import bubble_formula
from mmm.parallel.pp.pipeline import Pipeline, TimedStage
from mmm.parallel.pp.replay import Action, action_lists, replay
from mmm.parallel.pp.schedules import SCHEDULES, Schedule, stages_of
from mmm.parallel.pp.stages import balance_stages, parts_of, take_stage
from mmm.runtime.device import Precision
from support import reference

CPU = torch.device("cpu")
# 8 parts
DEEP = TransformerConfig(dim=32, n_layers=6, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256)
# Seconds of each kind of action: backward takes twice as long as forward, split in halves.
UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def actions(text: str) -> list[Action]:
    """Of ``0F0 0F1 0B0``."""
    return [Action(int(word[0]), word[1], int(word[2:])) for word in text.split()]


def test_by_hand():
    """Two stages, two micro-batches; B twice as long as F.

    rank 0   F0 F1  ·  · B0 B0  · B1 B1
    rank 1    · F0 B0 B0 F1 B1 B1  ·  ·
    """
    rows = [actions("0F0 0F1 0B0 0B1"), actions("1F0 1B0 1F1 1B1")]
    replayed = replay(rows, lambda action: UNIT[action.kind])
    assert [(str(b.action), b.begin, b.end) for b in replayed.rows[0]] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0B0", 4, 6),
        ("0B1", 7, 9),
    ]
    assert [b.begin for b in replayed.rows[1]] == [1, 2, 4, 5]
    assert replayed.seconds == 9
    assert replayed.bubble == pytest.approx(bubble_formula("1F1B", 2, 2))


def test_unequal_times():
    """The slow rank never waits once it has begun; the other does whenever it is not needed."""
    rows = [actions("0F0 0F1 0B0 0B1"), actions("1F0 1B0 1F1 1B1")]
    replayed = replay(rows, lambda action: 3.0 if action.stage else 1.0)
    assert replayed.seconds == 1 + 4 * 3 + 1
    assert replayed.bubble == pytest.approx(6 / 14)


def test_split_backward():
    """W fills what B would leave: nobody needs it."""
    rows = [actions("0F0 0I0 0W0"), actions("1F0 1I0 1W0")]
    replayed = replay(rows, lambda action: UNIT[action.kind])
    assert [b.begin for b in replayed.rows[0]] == [0, 3, 4]
    assert [b.begin for b in replayed.rows[1]] == [1, 2, 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16), (3, 6), (8, 16)])
def test_equal_times_are_the_formula(schedule, pp, microbatches):
    for per_rank in {SCHEDULES[schedule].min_stages, SCHEDULES[schedule].max_stages or 3}:
        stages = [stages_of(rank, pp, schedule, per_rank) for rank in range(pp)]
        lists = action_lists(schedule, pp, microbatches, stages)
        replayed = replay(lists, lambda action: UNIT[action.kind])
        assert replayed.bubble == pytest.approx(bubble_formula(schedule, pp, microbatches, per_rank), rel=1e-12)
        for rank, row in enumerate(lists):
            done = {(a.stage, kind, a.microbatch) for a in row for kind in ("IW" if a.kind == "B" else a.kind)}
            assert done == set(itertools.product(stages[rank], "FIW", range(microbatches)))


class OwnLists(schedules.ScheduleInterleaved1F1B):
    """A schedule of one's own, with lists of actions."""


class OwnLoop(schedules.ScheduleGPipe):
    """A schedule of one's own that runs a loop."""


def test_a_schedule_of_ones_own_has_its_lists(monkeypatch):
    """It was looked for among PyTorch's."""
    stages = [[0, 2], [1, 3]]
    monkeypatch.setitem(SCHEDULES, "Own", Schedule(schedule_class=OwnLists))
    assert action_lists("Own", 2, 4, stages) == action_lists("Interleaved1F1B", 2, 4, stages)
    monkeypatch.setitem(SCHEDULES, "Own", Schedule(schedule_class=OwnLoop))
    with pytest.raises(LayoutError, match="OwnLoop"):
        action_lists("Own", 2, 4, [[0], [1]])


def test_formula_has_its_bounds():
    assert bubble_formula("GPipe", 4, 2) == 3 / 5
    assert bubble_formula("LoopedBFS", 4, 2, 2) is None
    assert bubble_formula("ZBVZeroBubble", 4, 5, 2) is None
    stages = [stages_of(rank, 4, "ZBVZeroBubble", 2) for rank in range(4)]
    for microbatches in (5, 6):
        bubble = replay(action_lists("ZBVZeroBubble", 4, microbatches, stages), lambda a: UNIT[a.kind]).bubble
        assert (bubble > 3 / (3 * microbatches * 2 + 3) + 1e-9) == (microbatches == 5)


def test_refused():
    with pytest.raises(ValueError, match="0B0"):
        replay([actions("0B0 0F0"), actions("1F0 1B0")], lambda _: 1.0)
    with pytest.raises(ValueError, match=r"0B1"):
        replay([actions("0F0 0F1 0B1 0B0"), actions("1B0 1F0 1F1 1B1")], lambda _: 1.0)
    # Nobody does 0F1.
    with pytest.raises(ValueError, match="1F1"):
        replay([actions("0F0"), actions("1F0 1F1")], lambda _: 1.0)


def note_actions(done: list[Action]):
    """Have every stage note what it does, once a forward or a backward of a training step has been computed."""

    def noting(method, kind_of):
        def noted(self, microbatch, *args, **kwargs):
            result = method(self, microbatch, *args, **kwargs)
            done.append(Action(self.stage_index, kind_of(kwargs), microbatch))
            return result

        return noted

    kinds = {
        "forward_one_chunk": lambda _: "F",
        "backward_one_chunk": lambda named: "B" if named.get("full_backward", True) else "I",
        "backward_weight_one_chunk": lambda _: "W",
    }
    for name, kind_of in kinds.items():
        setattr(TimedStage, name, noting(getattr(TimedStage, name), kind_of))


def run_schedules(rank, names, microbatches):
    """Of each schedule what this rank did in a step; its losses of steps and of an evaluation are the same."""
    layout = Layout(pp=rank.world_size).fit(rank.world_size)
    plan = transformer_plan()
    mesh = build_mesh(layout, "cpu")
    lists = {}
    done = []
    before = dict(vars(TimedStage))
    note_actions(done)
    batch = reference.tokens().batch(0, 8, 0, 8)
    for name in names:
        with torch.device("meta"):
            model = Transformer(DEEP)
        parts = parts_of(model, plan)
        per_rank = SCHEDULES[name].min_stages
        cuts = balance_stages([1.0] * len(parts), layout.pp * per_rank)
        stages = {n: take_stage(model, parts, cuts[n]) for n in stages_of(rank.rank, layout.pp, name, per_rank)}
        for stage in stages.values():
            parallelize(stage, mesh, plan, Precision("fp32", torch.float32, torch.float32))
            materialize(stage, CPU, 0)
        pipeline = Pipeline(
            stages,
            len(cuts),
            mesh,
            schedule=name,
            microbatches=microbatches,
            device=CPU,
            loss=lambda output, targets: cross_entropy(output, targets, batch.count),
        )
        losses = []
        for step in range(3):
            done.clear()
            losses.append(pipeline.step(batch.inputs, batch.targets).item())
            lists[name] = list(done)
            if step == 1:
                losses.append(pipeline.evaluate(batch.inputs, batch.targets).item())
        assert losses == [pytest.approx(losses[0], rel=1e-6)] * 4
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        setattr(TimedStage, name, before[name])
    return lists


def check_order(everyone, ranks, microbatches):
    for name in everyone[0]:
        per_rank = SCHEDULES[name].min_stages
        stages = [stages_of(rank, ranks, name, per_rank) for rank in range(ranks)]
        assert [by_rank[name] for by_rank in everyone] == action_lists(name, ranks, microbatches, stages), name


def test_two_real_ranks(run_on_ranks):
    """Every action once, in the order of PyTorch's list."""
    check_order(run_on_ranks(run_schedules, 2, ["1F1B", "ZBVZeroBubble"], 4), 2, 4)


@pytest.mark.long
def test_all_schedules_on_four_ranks(run_on_ranks):
    check_order(run_on_ranks(run_schedules, 4, list(SCHEDULES), 8), 4, 8)
