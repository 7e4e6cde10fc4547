"""What a model costs a rank, by formula: `Costs` is what is asked, and functions are what several models share.

Each formula stands once, in a model's ``costs.py``. The planner reads it for layouts that nobody has run, and
`mmm.traffic.formulas` for a run's, beside what was counted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from mmm.layout import Layout
from mmm.parallel.collective_bytes import factor

STATISTIC = 4  # bytes of a float32


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What costs depend on besides the model.

    Attributes:
        layout: of the ranks.
        ulysses: ranks of cp that shard heads among them.
        batch: samples of a step, of one data-parallel coordinate.
        microbatches: of a step.
        sequence: length of a sample, in tokens or patches.
        compute: bytes of an element in matrix products.
        residual: bytes of an element in the residual stream.
        device: cuda, xpu or cpu.
    """

    layout: Layout
    ulysses: int = 1
    batch: float = 1
    microbatches: int = 1
    sequence: int = 0
    compute: int = 4
    residual: int = 4
    device: str = "cpu"

    @property
    def tokens(self) -> float:
        """Tokens or patches of a step that a rank has along cp."""
        return self.batch * self.sequence / self.layout.cp


@dataclass(frozen=True)
class Held:
    """Which of a model's modules a rank has.

    Attributes:
        layers: how many.
        first: whether it has the embedding.
        last: whether it has the output.
        modules: names of all that the model itself has, such as ``fc1``.
    """

    layers: int
    first: bool
    last: bool
    modules: frozenset[str] = frozenset()


@dataclass(frozen=True)
class KeptActivations:
    """What a rank's layer keeps in memory, in bytes a token.

    Attributes:
        none: kept for backward without checkpointing.
        selective: kept with selective checkpointing.
        full: kept with full checkpointing.
        working: what backward needs on top, at its peak.
        boundary: what passes to the next layer.
        head: kept by the norm before the output.
        traffic: what element-wise kernels of a forward read and write.
        a_position: bytes a token of the sequence, whatever the batch: rotary angles.
    """

    none: float
    selective: float
    full: float
    working: float
    boundary: float
    head: float
    traffic: float
    a_position: float = 0.0


class Costs(ABC):
    """What a model costs a rank.

    Attributes:
        planned: whether there is a formula for all that the planner asks.
    """

    planned = True

    @abstractmethod
    def kept(self, config: Any, setting: Setting) -> KeptActivations:
        """What one layer keeps."""

    @abstractmethod
    def pairs(self, config: Any) -> int:
        """Pairs of matrices in a layer that tp shards, the first by columns and the second by rows."""

    @abstractmethod
    def sent_over_tp(self, config: Any, setting: Setting, held: Held) -> float:
        """Bytes that tensor parallelism sends in a step."""

    def sent_over_cp(self, config: Any, setting: Setting, held: Held) -> dict[str, float]:
        """Bytes that attention over cp sends in a step, by axis."""
        raise ValueError(f"no formula for {type(config).__name__} over cp")

    def sent_over_ep(self, config: Any, setting: Setting, held: Held) -> float:
        """Bytes that tokens take in a step which go to their experts and back."""
        return 0.0

    def sent(self, config: Any, setting: Setting, held: Held) -> dict[str, float]:
        """Bytes that a rank sends in a step, by axis: of tp, of cp (which may be two axes), and of ep."""
        layout = setting.layout
        by_axis: dict[str, float] = {}
        if layout.tp > 1:
            by_axis["tp"] = self.sent_over_tp(config, setting, held)
        if layout.cp > 1:
            by_axis |= self.sent_over_cp(config, setting, held)
        if layout.ep > 1:
            by_axis["ep"] = self.sent_over_ep(config, setting, held)
        return by_axis

    def boundary(self, config: Any, setting: Setting) -> float:
        """Bytes of what passes between two layers, for all samples of a step."""
        return self.kept(config, setting).boundary * setting.tokens


def sent_by_pairs(setting: Setting, dim: int, held: Held, pairs: int, biases: bool = False) -> float:
    """Bytes that tensor parallelism sends for a language model whose sequence is sharded between the products.

    Args:
        dim: of the residual stream.
        pairs: of matrix products in a layer.
        biases: whether norms have them.
    """
    tp, tokens, layers = setting.layout.tp, setting.tokens, held.layers
    residual, compute = setting.residual, setting.compute
    # An all-gather before columns, a reduce-scatter after rows, and in backward each the other way round.
    passes = 2 * (pairs * layers * (residual + compute) + (held.first + held.last) * residual)
    norms = (2 * layers + held.last) * (1 + biases)  # each rank has the gradient of its local tokens
    loss = 3 * tokens * max(compute, 4) * held.last  # the largest logit, the sum of exponentials, the target's logit
    return factor("all_gather", tp) * (passes * tokens * dim + 2 * (norms * dim * residual + loss))


def heads_over_cp(n_kv_heads: int, tp: int, ulysses: int) -> int:
    """The key/value heads of a rank that attention over cp sends.

    tp shards them; where it has more ranks than there are heads, each rank has one, which others have as well. They are
    repeated until `ulysses` divides them.
    """
    own = max(n_kv_heads // tp, 1)
    return math.lcm(own, ulysses)


def sent_by_attention(config: Any, setting: Setting, layers: int) -> dict[str, float]:
    """Bytes that attention over cp sends, by axis: all-to-alls of `Setting.ulysses` ranks, a ring of the others."""
    cp, tp, ulysses, size = setting.layout.cp, setting.layout.tp, setting.ulysses, setting.compute
    a_head = setting.tokens * config.head_dim  # elements in one head of this rank's tokens
    queries = config.n_heads // tp * a_head
    keys = 2 * heads_over_cp(config.n_kv_heads, tp, ulysses) * a_head  # and values
    ring = cp // ulysses
    sent = {"cp_ring": 0.0, "cp_ulysses": 0.0}
    if ulysses > 1:  # queries, keys and values, outputs
        sent["cp_ulysses"] = 2 * layers * factor("all_to_all", ulysses) * (2 * queries + keys) * size
    if ring > 1:  # as large as before: fewer heads of more tokens
        sent["cp_ring"] = layers * keys * (2 * (ring - 1) * size + ring * max(size, 4))
    return sent if 1 < ulysses < cp else {"cp": sum(sent.values())}
