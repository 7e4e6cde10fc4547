"""How PyTorch's own modules start, as rules for `mmm.nn.init`: the distributions that PyTorch documents.

A module whose class overrides ``reset_parameters`` has no rule here: what it draws is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from mmm.nn.init import Init
from mmm.torch_private.module import RESETS, Convolution, NormBase

# Maps a name inside a module to how that tensor starts.
Rules = dict[str, Init]
ONES = Init("constant", 1.0)
ZEROS = Init("constant", 0.0)


def _uniform(fan_in: float) -> Rules:
    """Weight and bias in ±1 / √fan_in: what kaiming_uniform_ with a = √5 comes to."""
    bound = fan_in**-0.5 if fan_in else 0.0
    rule = Init("uniform", bound)
    return {"weight": rule, "bias": rule}


def _linear(module: nn.Linear) -> Rules:
    return _uniform(module.in_features)


def _bilinear(module: nn.Bilinear) -> Rules:
    return _uniform(module.in1_features)


def _convolution(module: Convolution) -> Rules:
    # A weight is (out, in, …); that of a transposed convolution is (in, out, …), and PyTorch counts its dim 1.
    channels = module.out_channels if module.transposed else module.in_channels
    fan_in = channels // module.groups * math.prod(module.kernel_size)
    return _uniform(fan_in)


def _embedding(module: nn.Embedding | nn.EmbeddingBag) -> Rules:
    return {"weight": Init("normal", 1.0, zero_row=module.padding_idx)}


def _norm(module: nn.Module) -> Rules:
    return {
        "weight": ONES,
        "bias": ZEROS,
        "running_mean": ZEROS,
        "running_var": ONES,
        "num_batches_tracked": ZEROS,
    }


def _prelu(module: nn.PReLU) -> Rules:
    return {"weight": Init("constant", float(module.init))}


def _xavier(fan_in: int, fan_out: int) -> Init:
    return Init("uniform", math.sqrt(6 / (fan_in + fan_out)))


def _attention(module: nn.MultiheadAttention) -> Rules:
    dim = module.embed_dim
    added_token = Init("normal", dim**-0.5)
    return {
        # q, k and v in one matrix.
        "in_proj_weight": _xavier(dim, 3 * dim),
        "q_proj_weight": _xavier(dim, dim),
        "k_proj_weight": _xavier(module.kdim, dim),
        "v_proj_weight": _xavier(module.vdim, dim),
        "in_proj_bias": ZEROS,
        "out_proj.bias": ZEROS,
        "bias_k": added_token,
        "bias_v": added_token,
    }


def _transformer(module: nn.Transformer) -> Rules:
    """All matrices by Xavier, whatever the modules inside would do."""
    rules = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            # A matrix is (out, in).
            rules[name] = _xavier(parameter.shape[1], parameter.shape[0])
    return rules


def _recurrent(module: nn.RNNBase | nn.RNNCellBase) -> Rules:
    rule = Init("uniform", module.hidden_size**-0.5)
    return {name: rule for name, _ in module.named_parameters(recurse=False)}


KINDS: tuple[tuple[type[nn.Module], Callable[..., Rules]], ...] = (
    (nn.Linear, _linear),
    (nn.Bilinear, _bilinear),
    (Convolution, _convolution),
    (nn.Embedding, _embedding),
    (nn.EmbeddingBag, _embedding),
    (nn.LayerNorm, _norm),
    (nn.GroupNorm, _norm),
    (nn.RMSNorm, _norm),
    # BatchNorm, SyncBatchNorm and InstanceNorm.
    (NormBase, _norm),
    (nn.Transformer, _transformer),
    (nn.MultiheadAttention, _attention),
    (nn.RNNBase, _recurrent),
    (nn.RNNCellBase, _recurrent),
    (nn.PReLU, _prelu),
)


def default_rules(model: nn.Module) -> Rules:
    """The rules for all parameters and buffers of PyTorch's modules in `model`, by their names in `model`."""
    by_name: Rules = {}
    # Outer modules come first, and their rules win over those of the modules inside.
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, rules_of in KINDS:
            if isinstance(module, kind) and _starts_like(module, kind):
                for name, rule in rules_of(module).items():
                    full_name = f"{path}.{name}" if path else name
                    by_name.setdefault(full_name, rule)
    return by_name


def _starts_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module has the ``reset_parameters`` of `kind`, and not one of its own."""
    for reset in RESETS:
        own = getattr(type(module), reset, None)
        if own is not getattr(kind, reset, None):
            return False
    return True
