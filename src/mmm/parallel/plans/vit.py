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

from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from mmm.errors import LayoutError
from mmm.models.vit import ViTConfig
from mmm.parallel.advice import Broken, advise
from mmm.parallel.mesh import Layout
from mmm.parallel.plan import Plan, axis_problems
from mmm.parallel.tensor.replicated import Replicated


def vit_plan() -> Plan:
    """The plan of `mmm.models.vit.ViT`, of any size."""
    styles: dict[str, ParallelStyle] = {
        "embedding": Replicated(),
        "layers.*.attention_norm": Replicated(),
        # One entrance for wq, wk and wv: their gradients are added here before they are added over tp.
        "layers.*.attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.mlp_norm": Replicated(),
        "layers.*.mlp.fc1": ColwiseParallel(),
        "layers.*.mlp.fc2": RowwiseParallel(),
        "norm": Replicated(),
        "head": Replicated(),
    }
    return Plan(
        tensor=styles,
        fsdp_units=("embedding", "layers.*", ("norm", "head")),
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
    if wrong := config.problems() + axis_problems(vit_plan(), layout):
        raise LayoutError("; ".join(wrong))
    width = "dim" if config.mlp_dim is None else "mlp_dim"  # what the MLP's width follows from
    given = {flag: getattr(config, flag) for flag in ("n_heads", width)}

    def find(sizes: Mapping[str, int], layout: Layout) -> list[Broken]:
        changed = replace(config, **sizes)  # type: ignore[arg-type]
        if wrong := changed.problems():
            return [Broken(problem, problem) for problem in wrong]
        found = []
        for flag, size, what, change in (
            ("n_heads", changed.n_heads, "each rank takes whole heads", "n_heads"),
            ("mlp_dim", changed.hidden_dim, "each rank takes the same part of the MLP", width),
        ):
            if size % layout.tp:
                broken = "is not divisible by" if size > layout.tp else "<"
                found.append(Broken(flag, f"{flag} {size} {broken} tp {layout.tp} ({what})", change, ("tp",)))
        return found

    if text := advise(find, given, layout):
        raise LayoutError(text)
