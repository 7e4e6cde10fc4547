"""How the residual perceptron is sharded over tp: up by columns, down by rows; the rest is replicated."""

from __future__ import annotations

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.errors import LayoutError
from mmm.models.regression import Regression
from mmm.parallel.mesh import Layout
from mmm.parallel.plan import Plan
from mmm.parallel.tensor.replicated import Replicated


def regression_plan() -> Plan:
    """The plan of `mmm.models.regression.Regression`, of any size."""
    return Plan(
        tensor={
            "blocks.*.norm": Replicated(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": Replicated(),
        },
        fsdp_units=("blocks.*",),
        checkpointed=("blocks.*",),
        stages=("standardize", "blocks.*", "head"),
        refused={"cp": "the perceptron has no sequence to shard", "ep": "the perceptron has no experts"},
        check=lambda model, layout, inputs, cp_style: check_regression(model, layout),
    )


def check_regression(model: Regression, layout: Layout) -> None:
    """Raises LayoutError where tp does not divide the hidden units."""
    if model.hidden % layout.tp:
        raise LayoutError(f"hidden {model.hidden} is not divisible by tp {layout.tp}: use a tp that divides it")
