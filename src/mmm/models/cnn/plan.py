"""How the CNN is parallelized.

Over dp: ``fc1.weight`` has 98 % of the parameters, so it is an FSDP unit of its own. The rest goes with the root.

Over tp the two linear layers are sharded::

    conv1, conv2   replicated: a convolution cannot be sharded by its channels as a `DTensor`
      │
      ▼            (batch, features)
    fc1            [ A₀ │ A₁ │ A₂ │ A₃ ]     columns: each rank some of the hidden units
      │            (batch, hidden/tp)
                   ┌ A₀ ┐
    fc2            │ A₁ │  + bias, once      rows: each rank a partial sum
                   └ ⋮  ┘
      │ all-reduce
      ▼            (batch, classes)
"""

from __future__ import annotations

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.layout import Layout
from mmm.models.cnn.model import CNNConfig
from mmm.models.rules import check_by, tp_rule
from mmm.parallel.plan import Plan
from mmm.parallel.tp.replicated import Replicated
from mmm.parallel.tp.tensor_parallel import ShardedDropout


def cnn_plan(config: CNNConfig | None = None) -> Plan:
    """The plan of `mmm.models.cnn.model.CNN`, of any size."""
    return Plan(
        tensor={
            # tp ranks have the same images, so the convolutions and their gradients are the same on each.
            "conv1": Replicated(),
            "conv2": Replicated(),
            "fc1": ColwiseParallel(),
            # Each rank drops what one device would drop of its hidden units.
            "dropout2": ShardedDropout(),
            "fc2": RowwiseParallel(),
        },
        fsdp_units=("fc1",),
        stages=("conv1", "conv2", "fc1", "fc2"),
        refused={"cp": "an image has no sequence to shard", "ep": "the CNN has no experts"},
        check=check_by(cnn_rules),
    )


def cnn_rules(
    config: CNNConfig,
    layout: Layout,
    seq_length: int = 0,
    ulysses: int = 1,
) -> dict[str, str]:
    """The rules that the CNN breaks on a layout, by name."""
    problems = config.problems()
    if problems:
        return {problem: problem for problem in problems}
    return tp_rule("hidden", config.hidden, layout.tp, "each rank takes the same number")
