"""How the ViT is sharded over tp.

Between the sharded matrices activations are replicated. The sequence is not sharded, unlike in the Transformer's plan:
few numbers of ranks divide 14 × 14 = 196 patches, and even fewer divide 7 × 7::

    embedding          replicated
    activations        (batch, patches, dim)         norms, residuals: the same on every rank
      │
      ▼
    wq wk wv, fc1      [ A₀ │ A₁ │ A₂ │ A₃ ]         columns: each rank some of the heads, of the hidden units
      │
      ▼                (batch, patches, heads/tp, …) attention and GELU: no communication
                       ┌ A₀ ┐
    wo, fc2            │ A₁ │  + bias, once          rows: each rank a partial sum
                       └ ⋮  ┘
      │ all-reduce     (backward: all-reduce of the gradient where wq wk wv, or fc1, begin)
      ▼                (batch, patches, dim)
    norm, head         replicated
"""

from __future__ import annotations

from torch.distributed.tensor.parallel import ParallelStyle

from mmm.layout import Layout
from mmm.models.rules import HEADS, HIDDEN, check_by, tp_rule
from mmm.models.vit.model import ViTConfig
from mmm.parallel.plan import Plan
from mmm.parallel.tp.local import Columns, ColumnsThenRows, Rows
from mmm.parallel.tp.replicated import Replicated


def vit_plan(config: ViTConfig | None = None) -> Plan:
    """The plan of `mmm.models.vit.model.ViT`, of any size."""
    styles: dict[str, ParallelStyle] = {
        "embedding": Replicated(),
        "layers.*.attention_norm": Replicated(),
        # wq, wk and wv have the same input: one all-reduce over tp sums its gradients. Another adds up the outputs.
        "layers.*.attention": ColumnsThenRows(tokens=False),
        "layers.*.attention.wq": Columns(),
        "layers.*.attention.wk": Columns(),
        "layers.*.attention.wv": Columns(),
        "layers.*.attention.wo": Rows(),
        "layers.*.mlp_norm": Replicated(),
        "layers.*.mlp": ColumnsThenRows(tokens=False),
        "layers.*.mlp.fc1": Columns(),
        "layers.*.mlp.fc2": Rows(),
        "norm": Replicated(),
        "head": Replicated(),
    }
    return Plan(
        tensor=styles,
        fsdp_units=("embedding", "layers.*", ("norm", "head")),
        compiled=("layers.*",),
        checkpointed=("layers.*",),
        stages=("embedding", "layers.*", ("norm", "head")),
        refused={"cp": "the ViT's sequence is not sharded (a Swin's rows are)", "ep": "the ViT has no experts"},
        check=check_by(vit_rules),
    )


def vit_rules(
    config: ViTConfig,
    layout: Layout,
    seq_length: int = 0,
    ulysses: int = 1,
) -> dict[str, str]:
    """The rules that a Vision Transformer breaks on a layout, by name."""
    problems = config.problems()
    if problems:
        return {problem: problem for problem in problems}
    heads = tp_rule("n_heads", config.n_heads, layout.tp, HEADS)
    return heads | tp_rule("mlp_dim", config.hidden_dim, layout.tp, HIDDEN)
