"""What a model costs a rank, by formula. `Costs` is the interface; the functions are shared by several models.

Each formula stands only once, in the ``costs.py`` of a model. The planner uses it for layouts that nobody has run, and
`mmm.traffic.formulas` uses it to check what a run has counted.

The formulas of memory follow Korthikanti et al., "Reducing activation recomputation in large Transformer models", 2022
(sections 4 and 5). Those of tensor parallelism follow Shoeybi et al., "Megatron-LM", 2019, and of attention over cp Liu
et al., "Ring Attention with Blockwise Transformers", 2023, and Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from mmm.layout import Layout
from mmm.parallel.collective_bytes import factor

# Bytes of a statistic, such as the mean of a norm: a float32, whatever the dtype of the model.
STATISTIC = 4
# Bytes of the loss that the stages of a pipeline sum.
LOSS = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What costs depend on besides the model.

    Attributes:
        layout: the layout of the ranks.
        ulysses: number of cp ranks that shard the heads among them.
        batch: number of samples of a step on one data-parallel coordinate.
        microbatches: number of micro-batches in a step.
        sequence: length of a sample, in tokens or patches.
        compute: bytes of an element in matrix products.
        residual: bytes of an element in the residual stream.
        device: type of the device: cuda, xpu or cpu.
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
        """Number of tokens or patches of a step on one coordinate of dp and cp."""
        return self.batch * self.sequence / self.layout.cp


@dataclass(frozen=True)
class Held:
    """Which of a model's modules a rank has.

    Attributes:
        layers: number of layers.
        first: whether the rank has the embedding.
        last: whether the rank has the output.
        modules: names of the model's direct modules that the rank has, such as ``fc1``.
        boundaries: number of boundaries between one of the rank's pipeline stages and a stage of another rank.
    """

    layers: int
    first: bool
    last: bool
    modules: frozenset[str] = frozenset()
    boundaries: int = 0


@dataclass(frozen=True)
class KeptActivations:
    """What one layer of a rank keeps in memory, in bytes per token.

    Attributes:
        none: bytes kept for backward without activation checkpointing.
        selective: bytes kept with selective checkpointing.
        full: bytes kept with full checkpointing.
        working: bytes that backward needs on top of these at its peak.
        boundary: bytes that pass to the next layer.
        head: bytes that the norm before the output keeps.
        traffic: bytes that the element-wise kernels of a forward read and write.
        a_position: bytes per token of the sequence, whatever the batch is: rotary angles.
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
    """What a model costs a rank. `config` is always the model's sizes.

    Attributes:
        planned: whether there is a formula for everything that the planner asks for.
    """

    planned = True

    @abstractmethod
    def kept(self, config: Any, setting: Setting) -> KeptActivations:
        """What one layer keeps in memory."""

    @abstractmethod
    def pairs(self, config: Any) -> int:
        """Number of pairs of matrices in a layer that tp shards, the first by columns and the second by rows."""

    @abstractmethod
    def sent_over_tp(self, config: Any, setting: Setting, held: Held) -> float:
        """Bytes that tensor parallelism sends in a step."""

    def sent_over_cp(self, config: Any, setting: Setting, held: Held) -> dict[str, float]:
        """Bytes that attention over cp sends in a step, by axis."""
        raise ValueError(f"no formula for {type(config).__name__} over cp")

    def sent_over_ep(self, config: Any, setting: Setting, held: Held) -> float:
        """Bytes of the tokens that a rank sends to their experts, and back, in a step."""
        return 0.0

    def sent(self, config: Any, setting: Setting, held: Held) -> dict[str, float]:
        """Bytes that a rank sends in a step, by axis: tp, cp (which may be two axes), ep and pp."""
        layout = setting.layout
        by_axis: dict[str, float] = {}
        if layout.tp > 1:
            by_axis["tp"] = self.sent_over_tp(config, setting, held)
        if layout.cp > 1:
            by_axis |= self.sent_over_cp(config, setting, held)
        if layout.ep > 1:
            by_axis["ep"] = self.sent_over_ep(config, setting, held)
        if layout.pp > 1:
            # Activations to the stage after it, gradients to the stage before it; then the loss is summed over pp.
            boundary = self.kept(config, setting).boundary * setting.tokens
            by_axis["pp"] = held.boundaries * boundary + factor("all_reduce", layout.pp) * LOSS
        return by_axis


def sent_by_pairs(
    setting: Setting,
    dim: int,
    held: Held,
    pairs: int,
    biases: bool = False,
) -> float:
    """Bytes that tensor parallelism sends in a step, for a language model whose sequence is sharded between products.

    Args:
        dim: width of the residual stream.
        pairs: number of pairs of matrices in a layer.
        biases: whether norms have biases.
    """
    tp = setting.layout.tp
    # Each pair of matrices all-gathers its input, in the dtype of the residual stream, and reduce-scatters its output,
    # in the dtype of products. In backward each is replaced by the other. The embedding only reduce-scatters, and the
    # output only all-gathers, both in the dtype of the residual stream.
    per_pair = setting.residual + setting.compute
    ends = held.first + held.last
    bytes_per_element = 2 * (pairs * held.layers * per_pair + ends * setting.residual)
    # Of the residual stream, (batch, seq, dim).
    activations = bytes_per_element * setting.tokens * dim

    # A rank has the gradients of norms for its local tokens only: they are all-reduced, which is two all-gathers.
    weights_per_norm = 1 + biases
    norms = (2 * held.layers + held.last) * weights_per_norm * dim * setting.residual

    # The loss of a sharded vocabulary all-reduces three numbers for each token: the largest logit, the sum of
    # exponentials, the target's logit. They are float32 at least.
    loss = 3 * setting.tokens * max(setting.compute, 4) * held.last
    return factor("all_gather", tp) * (activations + 2 * (norms + loss))


def heads_over_cp(n_kv_heads: int, tp: int, ulysses: int) -> int:
    """The number of key/value heads that a rank sends in attention over cp.

    tp shards the heads. With more ranks of tp than heads, each rank has one head, which other ranks have as well. For
    Ulysses the heads are repeated until `ulysses` divides them.
    """
    local_heads = max(n_kv_heads // tp, 1)
    return math.lcm(local_heads, ulysses)


def sent_by_attention(config: Any, setting: Setting, layers: int) -> dict[str, float]:
    """Bytes that attention over cp sends in a step, by axis.

    Groups of `Setting.ulysses` ranks exchange heads by all-to-alls. The groups form a ring.
    """
    cp = setting.layout.cp
    tp = setting.layout.tp
    ulysses = setting.ulysses
    ring = cp // ulysses
    # Elements of one head of this rank's tokens.
    head = setting.tokens * config.head_dim
    queries = config.n_heads // tp * head
    # The same number of keys and of values.
    keys_values = 2 * heads_over_cp(config.n_kv_heads, tp, ulysses) * head

    sent = {"cp_ring": 0.0, "cp_ulysses": 0.0}
    if ulysses > 1:
        # Queries, keys and values before attention, its output afterwards; in backward their gradients.
        elements = 2 * queries + keys_values
        sent["cp_ulysses"] = 2 * layers * factor("all_to_all", ulysses) * elements * setting.compute
    if ring > 1:
        # The all-to-alls leave the number of elements as it was: fewer heads of more tokens. In forward and again in
        # backward they make ring - 1 hops. Their gradients travel with them, in float32 at least, and make one hop
        # more, to come home.
        bytes_per_element = 2 * (ring - 1) * setting.compute + ring * max(setting.compute, 4)
        sent["cp_ring"] = layers * keys_values * bytes_per_element
    if 1 < ulysses < cp:
        return sent
    # There is only one of the two, on the axis cp itself.
    return {"cp": sum(sent.values())}
