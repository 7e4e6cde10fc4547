"""What a picture shows is what real ranks hold, and the bytes that the dry run counts."""

import re
from functools import cache, partial
from unittest.mock import patch

import pytest
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mmm.layout import Layout
from mmm.nn import weights
from mmm.parallel.local import local_box, to_local
from mmm.run.command_line import configure
from mmm.traffic.operators import axes_of
from mmm.trainer import lm
from mmm_lab.cli.draw_layout import layout_of, trainer_flags
from mmm_lab.planner.dry_run import dry_run
from mmm_lab.planner.dry_run_report import totals
from mmm_lab.planner.held import coordinate_on
from mmm_lab.planner.picture.facts import Facts
from mmm_launch.host.child import run_as_main
from mmm_launch.program.target import Target
from support.pool import program_on

# One step, and nothing after it.
SHORT = {"max_iters": 1, "plots": False, "eval_every": 0}


@cache
def facts_of(name):
    layout, techniques = layout_of(name)
    flags = trainer_flags(layout, techniques, [])
    program = partial(run_as_main, Target("module", "mmm.trainer.lm", tuple(flags)))
    return Facts(dry_run(program, layout.ranks))


def held_on(rank, flags, outdir):
    """On a real rank of the same program: each parameter's box, and the shapes of what the optimizer updates."""
    boxes = {}
    updated = []
    initialize = weights.initialize

    def noted(model: nn.Module, *args, **named):
        boxes.update({name: local_box(p) for name, p in model.named_parameters()})
        initialize(model, *args, **named)

    def before(optimizer, *_):
        updated.extend(tuple(to_local(p.detach()).shape) for g in optimizer.param_groups for p in g["params"])

    hook = register_optimizer_step_pre_hook(before)
    with program_on(rank), patch.object(weights, "initialize", noted):
        lm.train(configure(lm.Config, **flags, **SHORT, outdir=outdir))
    hook.remove()
    return boxes, updated


@pytest.mark.parametrize(
    "name",
    ["dp2.tp2", *(pytest.param(n, marks=pytest.mark.long) for n in ("zero1:2.tp2", "pp2.dp2", "dp4.ep2", "hsdp"))],
)
def test_parts_are_those_of_real_ranks(run_on_ranks, tmp_path, name):
    facts = facts_of(name)
    argv = trainer_flags(*layout_of(name), [])
    pairs = zip(argv[::2], argv[1::2], strict=True)
    flags = {flag.strip("-"): int(value) if value.isdigit() else value for flag, value in pairs}
    if "tp" in flags:
        # The field's own name.
        flags["tpsize"] = flags.pop("tp")
    for rank, (boxes, updated) in enumerate(run_on_ranks(held_on, facts.layout.ranks, flags, tmp_path / "run")):
        held = facts.held(rank)
        assert {parameter.name: parameter.box(facts.layout, rank) for parameter in held.parameters} == boxes
        assert [parameter.box(facts.layout, rank).length for parameter in held.updated] == updated
        for grid, tensor in zip(facts.grids(rank), facts.matrices, strict=False):
            # A rank of another stage has the matrix of another layer.
            layers = re.compile(re.sub(r"\b\d+\b", r"\\d+", tensor.name))
            box = next(box for name, box in boxes.items() if layers.fullmatch(name))
            assert grid.pieces == ((*box.start, *box.length),)


@pytest.mark.parametrize("name", ["dp2.tp2", pytest.param("pp2.dp2", marks=pytest.mark.long)])
def test_bytes_are_those_that_are_counted(name):
    facts = facts_of(name)
    for report in facts.dry.ranks:
        counted = {key: entry for key, entry in totals(report).items() if entry.sent}
        shown = {}
        for flow in facts.flows(report.rank):
            calls, sent = shown.get((flow.axis, flow.operation), (0, 0.0))
            shown[flow.axis, flow.operation] = calls + flow.calls, sent + flow.sent
        assert shown == {key: (entry.calls, entry.sent) for key, entry in counted.items()}


@pytest.mark.long
def test_of_a_pipeline():
    """Activations go forward, gradients back; a rank has the modules of its stage."""
    facts = facts_of("pp2.dp2")
    for rank, phase in ((0, "forward"), (2, "backward")):
        assert [flow.doing for flow in facts.flows(rank) if flow.operation == "send"] == [phase]
        assert facts.modules(rank) == facts.modules(rank + 1)
    assert facts.modules(0) == ("tok_embeddings", "layers.0", "layers.1")
    assert facts.modules(2) == ("layers.2", "layers.3", "norm", "output")
    assert not facts.loops


@pytest.mark.parametrize(
    "name", ["zero1", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp", "zero2", "fsdp"))]
)
def test_what_each_stage_of_zero_shards(name):
    """Weights, gradient, optimizer state: whether a rank has all of each."""
    # A grid without axes is not sharded.
    weight, gradient, state = (not grid.axes for grid in facts_of(name).grids(1))
    expected = {"ddp": "111", "zero1": "110", "zero2": "100", "fsdp": "000"}[name]
    assert f"{weight:d}{gradient:d}{state:d}" == expected


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, tp=2, pp=2),
        Layout(dp_replicate=2, dp_shard=4, cp=2, tp=2),
        Layout(dp_shard=8, ep=2, tp=2),
        Layout(dp_shard=1, cp=4),
    ],
    ids=str,
)
def test_coordinates_number_the_ranks_of_every_group(layout):
    for rank in range(layout.ranks):
        for ranks, axis in axes_of(layout, rank, experts=layout.ep > 1).items():
            assert [coordinate_on(axis, layout, coordinate) for coordinate in ranks] == [*range(len(ranks))]
