"""LoRA: a frozen matrix, and two small ones next to it that are trained in its place.

::

    x (…, in) ──┬── W  (out, in)      frozen ──────────────── + ──► (…, out)
                └── lora_A (rank, in) ──► lora_B (out, rank) · scale ──┘

A matrix of 4096 × 4096 has 16.8 million elements, and with rank 8 the two next to it have 65,536. Only these have
gradients and optimizer state. ``lora_B`` starts as zeros, so a run starts with exactly the base.

Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021. Names and initial values are those of
Hugging Face's PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.init import Init

# The names of the two matrices in a `LoRALinear`, which are PEFT's.
A = "lora_A"
B = "lora_B"


@dataclass(frozen=True)
class LoRA:
    """Which matrices of a model get two small ones, and how large these are.

    Attributes:
        rank: rows of A, and columns of B.
        alpha: the product B A is multiplied by ``alpha / rank``.
        targets: names of the matrices in Hugging Face's files, such as ``q_proj``.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoRALinear(nn.Linear):
    """A Linear with ``lora_A`` and ``lora_B`` next to its own weight. Weight and bias keep their names.

    Args:
        base: the Linear that it replaces. Its parameters are taken over, not copied.
        rank: rows of A, and columns of B.
        scale: factor of the product B A.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        # Not Linear's constructor, which would make a weight.
        nn.Module.__init__(self)
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.scale = scale
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        device = base.weight.device
        dtype = base.weight.dtype
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        # (…, in) → (…, rank) → (…, out)
        update = self.lora_B(self.lora_A(x))
        return F.linear(x, self.weight, self.bias) + update * self.scale


def is_lora(name: str) -> bool:
    """Whether a parameter of that name is an A or a B."""
    components = name.split(".")
    return A in components or B in components


def add_lora(model: nn.Module, patterns: Collection[str], rank: int, scale: float) -> None:
    """Freeze all parameters of a model, and put A and B next to some of its matrices, in place.

    Args:
        model: the full model. Its method ``init_rule`` stays the rule for the base.
        patterns: paths of Linears, such as ``layers.*.attention.wq``.
        rank, scale: as for `LoRALinear`.
    """
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            assert isinstance(module, nn.Linear)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LoRALinear(module, rank, scale))
    rule_of_base: Callable[[str], Init | None] = model.init_rule  # type: ignore[assignment]
    model.init_rule = lambda name: _rule(name, rule_of_base)  # type: ignore[assignment]


def _rule(name: str, rule_of_base: Callable[[str], Init | None]) -> Init | None:
    """How a parameter starts (`mmm.nn.weights`): B as zeros, and A as PEFT draws it."""
    if not is_lora(name):
        return rule_of_base(name)
    if B in name.split("."):
        return Init("constant", 0.0)
    # None: as PyTorch's own Linear starts, which is uniform in ±1 / √in.
    return None
