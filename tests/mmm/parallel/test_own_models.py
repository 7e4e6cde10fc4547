"""Models as people write them (`support.own_models`), three steps on each layout: losses and weights are those of plain
PyTorch on the full batch, or the model is refused by name, or `mmm verify` finds it."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmm.errors import UserError
from mmm.parallel import Layout, build_mesh, materialize, meta_parameters, parallelize
from mmm.run.save_model import full_tensors
from support.own_model import CPU, FP64
from support.own_models import CASES

# It has the table of outcomes.
PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "your-model.md"
# Of the losses, and of each tensor of the weights beside its largest element.
BATCH, STEPS, BOUND = 8, 3, 1e-12
# The columns of the page's table.
LAYOUTS = {
    "1 rank": (Layout(dp_shard=1), "fsdp"),
    **{technique: (Layout(dp_shard=2), technique) for technique in ("fsdp", "ddp", "zero1", "zero2")},
    "tp2": (Layout(dp_shard=1, tp=2), "fsdp"),
    "dp2·tp2": (Layout(dp_shard=2, tp=2), "fsdp"),
    "dp2·tp2 zero1": (Layout(dp_shard=2, tp=2), "zero1"),
}
ZERO_TP = "dp2·tp2 zero1"
TP = ("tp2", "dp2·tp2", ZERO_TP)
DP = ("fsdp", "ddp", "zero1", "zero2")
FSDP = ("1 rank", "fsdp", "tp2", "dp2·tp2")
# Wrong, and found by `mmm verify` before training (`tests/mmm_verify/test_wrong_plans.py`).
VERIFY = "verify"
# Ranks call other FSDP units: not run here, since their collectives do not pair up.
NOT_RUN = (("routed experts", "fsdp"), ("routed experts", "dp2·tp2"))
# What is not the same: the model → layouts → the words by which it is refused; None: an error of PyTorch's, so far.
OTHERWISE: dict[str, dict[tuple[str, ...], str | None]] = {
    "routed experts": {("fsdp", "dp2·tp2"): VERIFY},
    "norm over the channels of all heads": {TP: None},
    "PINN, u''": {FSDP: "create_graph=True .* use ddp, zero1 or zero2"},
    "parameters and buffers of the model itself": {TP: "no style for gain"},
    "parameter without dims": {
        ("1 rank", "fsdp"): None,
        ("zero1", "zero2"): r"log_scale is a scalar.* \(1,\)",
        TP: "no style for log_scale",
    },
    "running mean in a buffer": {(*DP, "dp2·tp2", ZERO_TP): VERIFY},
    "frozen parameter that `forward` writes": {("1 rank", *DP): VERIFY, TP: "no style for code"},
    "Embedding with max_norm": {("1 rank", *DP): VERIFY, TP: None},
    "ModuleDict as an FSDP unit": {FSDP: None},
    "complex and real parameters in one module": {("1 rank", "fsdp"): None, TP: "no style for weight, bias"},
    "lazy modules": {tuple(LAYOUTS): r"0\.weight, 0\.bias of Sequential would get its shape"},
}
# Models that `make test` tries; all others are long.
QUICK = {
    "fsdp": [
        "FNO, complex weights",
        "ModuleDict as an FSDP unit",
        "complex and real parameters in one module",
    ],
    "zero2": ["gradient descent without an optimizer", "parameter without dims"],
    "tp2": ["LoRA, tied head"],
}


def outcome(name, layout):
    """same, refused, verify or error; and the words."""
    for layouts, message in OTHERWISE.get(name, {}).items():
        if layout in layouts:
            if message == VERIFY:
                return message, None
            return ("error" if message is None else "refused"), message
    return "same", None


class Gather(torch.autograd.Function):
    """All ranks' samples; in backward what all of them have for this rank's."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.samples = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.samples)[dist.get_rank(ctx.group)], None


def zero_missing(optimizer, *_):
    """What no sample has used has the gradient zero on ranks; in plain PyTorch it has none (docs/your-model.md)."""
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def steps(case, models, first, samples, gather):
    """The losses, (steps,). Args: first, samples: of each global batch."""
    optimizers = []
    for model in models:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kind, rate = (torch.optim.SGD, 0.1) if case.sgd else (torch.optim.AdamW, 1e-2)
        optimizers.append(kind(parameters, lr=rate))
        optimizers[-1].register_step_pre_hook(zero_missing)
    starts = [step * BATCH + first for step in range(STEPS)]
    # This rank's samples of each global batch.
    batches = [case.batch(range(start, start + samples)) for start in starts]
    return torch.stack([case.step(case, models, optimizers, batch, gather, BATCH) for batch in batches])


def plain(case):
    """Losses, and weights and buffers by name, of each model."""
    torch.manual_seed(0)
    models = [make().double() for make in case.makes]
    for parameter in (parameter for model in models for parameter in model.parameters()):
        # Which `double` leaves.
        if parameter.is_complex():
            parameter.data = parameter.data.to(torch.complex128)
    return steps(case, models, 0, BATCH, lambda x: (x, 0)), [model.state_dict() for model in models]


def parallel(rank, case, layout, technique):
    torch.manual_seed(0)
    mesh = build_mesh(layout, "cpu")
    models = []
    for make, plan in zip(case.makes, case.plans, strict=True):
        with meta_parameters():
            model = make()
        models.append(parallelize(model, mesh, plan, FP64, data_parallel=technique))
        materialize(models[-1], CPU, 0)
    group = mesh["dp_shard"].get_group()
    samples = BATCH // layout.dp
    first = layout.dp_coordinate(rank.rank) * samples
    losses = steps(case, models, first, samples, lambda x: (Gather.apply(x, group), first))
    # Each rank has the loss of its samples.
    dist.all_reduce(losses, group=group)
    return losses, [dict(full_tensors([model])) for model in models]


def off(tensors, expected):
    """The largest difference beside the largest element."""
    return ((tensors - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()


def compared(rank, names, layout, technique):
    """For each model how far losses and weights are off at most, or (class, text) of the error that ends it."""
    results = {}
    for name in names:
        try:
            losses, states = parallel(rank, CASES[name], layout, technique)
        except Exception as error:  # alike on all ranks
            results[name] = (type(error), str(error))
            continue
        expected_losses, expected = plain(CASES[name])
        pairs = [(losses, expected_losses)]
        for state, wanted in zip(states, expected, strict=True):
            # A tied weight is there once.
            assert state.keys() <= wanted.keys()
            pairs += [(tensor, wanted[name].to(tensor.dtype)) for name, tensor in state.items()]
        results[name] = max(off(*pair) for pair in pairs)
    return results


def held(run_on_ranks, names, layout):
    names = [name for name in names if (name, layout) not in NOT_RUN]
    for results in run_on_ranks(compared, LAYOUTS[layout][0].ranks, names, *LAYOUTS[layout]):
        for name in names:
            (kind, message), result = outcome(name, layout), results[name]
            if kind == "same":
                assert isinstance(result, float), (name, result)
            if kind == "refused":
                assert isinstance(result, tuple), (name, result)
                assert issubclass(result[0], UserError), (name, result)
                assert re.search(message, result[1]), (name, result)
            if isinstance(result, float) and kind != VERIFY:
                assert result <= BOUND, (name, result)


@pytest.mark.parametrize("layout", QUICK)
def test_some_of_them(run_on_ranks, layout):
    held(run_on_ranks, QUICK[layout], layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_or_refused(run_on_ranks, layout):
    held(run_on_ranks, [name for name in CASES if name not in QUICK.get(layout, ())], layout)


def page_of_outcomes():
    """Of docs/your-model.md: the models that are the same everywhere, and the table of the others."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in CASES:
        alike.setdefault(tuple(outcome(name, layout)[0] for layout in LAYOUTS), []).append(name)
    everywhere = alike.pop(("same",) * len(LAYOUTS))
    rows = [("model", *LAYOUTS), ("---",) * (1 + len(LAYOUTS))]
    for outcomes, names in alike.items():
        rows += [(name, *outcomes) for name in names]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return [f"- {name}\n" for name in everywhere], table


def test_the_outcomes_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    everywhere, table = page_of_outcomes()
    assert "".join(everywhere) in text, everywhere
    assert table in text, table
