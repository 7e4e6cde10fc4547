"""How the ViT is cut over tp.

Between the cut matrices every rank holds the whole activations: 14 × 14 = 196 patches divide over few ranks, and 7 × 7
over none, so the sequence is not cut (as it is in the Transformer's plan)::

    embedding          whole on every rank
    activations        (batch, patches, dim)         norms, residuals: every rank the same
      │
      ▼
    wq wk wv, fc1      [ A₀ │ A₁ │ A₂ │ A₃ ]         columns: each rank its own heads, its own hidden units
      │
      ▼                (batch, patches, heads/tp, …) attention and GELU: no communication
                       ┌ A₀ ┐
    wo, fc2            │ A₁ │  + bias, once          rows: each rank a summand of the whole
                       └ ⋮  ┘
      │ all-reduce     (backward: all-reduce of the gradient where wq wk wv, or fc1, begin)
      ▼                (batch, patches, dim)
    norm, head         whole on every rank
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from mmm.errors import LayoutError
from mmm.models.vit import ViTConfig
from mmm.parallel.mesh import Layout
from mmm.parallel.plan import Plan, axis_problems
from mmm.parallel.uncut import Uncut


def vit_plan() -> Plan:
    """The plan of `mmm.models.vit.ViT`, of any size."""
    styles: dict[str, ParallelStyle] = {
        "embedding": Uncut(),
        "layers.*.attention_norm": Uncut(),
        # One entrance for wq, wk and wv: their gradients are added here before they are added over tp.
        "layers.*.attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.mlp_norm": Uncut(),
        "layers.*.mlp.fc1": ColwiseParallel(),
        "layers.*.mlp.fc2": RowwiseParallel(),
        "norm": Uncut(),
        "head": Uncut(),
    }
    return Plan(
        tensor=styles,
        units=("embedding", "layers.*", ("norm", "head")),
        compiled=("layers.*",),
        # Not whole blocks: inside, attention takes a DTensor, whose gradients torch.compile has got silently wrong.
        compiled_with_tp=("layers.*.mlp",),
        checkpointed=("layers.*",),
        tiled=("layers.*.mlp",),
        stages=("embedding", "layers.*", ("norm", "head")),
        refused={"cp": "the ViT's sequence is not cut", "ep": "the ViT has no experts"},
        check=lambda model, layout, inputs, cp_style: check_vit(model.config, layout),
    )


def check_vit(config: ViTConfig, layout: Layout) -> None:
    """Whether a ViT of these sizes can be cut as the layout says; needs no process group.

    Raises:
        LayoutError: every rule that is broken, with its numbers and what to change.
    """
    wrong = config.problems()
    wrong += axis_problems(vit_plan(), layout)
    if not wrong and layout.tp > 1:
        for flag, size, what in (
            ("n_heads", config.n_heads, "each rank takes whole heads"),
            ("mlp_dim", config.hidden_dim, "each rank takes the same part of the MLP"),
        ):
            if size % layout.tp:
                nearest = sorted({max(size // layout.tp, 1) * layout.tp, (size // layout.tp + 1) * layout.tp})
                broken = "is not divisible by" if size > layout.tp else "<"
                wrong.append(
                    f"{flag} {size} {broken} tp {layout.tp} ({what}): use {flag} "
                    f"{' or '.join(map(str, nearest))}, or a tp that divides {size}"
                )
    if wrong:
        raise LayoutError("; ".join(wrong))
