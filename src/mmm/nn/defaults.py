"""How PyTorch's own modules start, as rules for `mmm.nn.draw`: the distributions that PyTorch documents.

A module whose class overrides ``reset_parameters`` has no rule here: what it draws is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from mmm.nn.draw import Init
from mmm.torch_private.module import RESETS, Convolution, NormBase

Rules = dict[str, Init]  # name inside the module → how it starts
ONES, ZEROS = Init("constant", 1.0), Init("constant", 0.0)


def _uniform(fan_in: float) -> Rules:
    bound = Init("uniform", fan_in**-0.5 if fan_in else 0.0)
    return {"weight": bound, "bias": bound}


def _convolution(module: Convolution) -> Rules:
    channels = module.out_channels if module.transposed else module.in_channels  # a transposed weight is (in, out, …)
    return _uniform(channels // module.groups * math.prod(module.kernel_size))


def _embedding(module: nn.Embedding | nn.EmbeddingBag) -> Rules:
    return {"weight": Init("normal", 1.0, zero_row=module.padding_idx)}


def _norm(module: nn.Module) -> Rules:
    statistics = {"running_mean": ZEROS, "running_var": ONES, "num_batches_tracked": ZEROS}
    return {"weight": ONES, "bias": ZEROS, **statistics}


def _xavier(fan_in: int, fan_out: int) -> Init:
    return Init("uniform", math.sqrt(6 / (fan_in + fan_out)))


def _attention(module: nn.MultiheadAttention) -> Rules:
    dim = module.embed_dim
    added = Init("normal", dim**-0.5)
    return {
        "in_proj_weight": _xavier(dim, 3 * dim),
        "q_proj_weight": _xavier(dim, dim),
        "k_proj_weight": _xavier(module.kdim, dim),
        "v_proj_weight": _xavier(module.vdim, dim),
        "in_proj_bias": ZEROS,
        "out_proj.bias": ZEROS,
        "bias_k": added,
        "bias_v": added,
    }


def _transformer(module: nn.Transformer) -> Rules:
    matrices = ((name, p.shape) for name, p in module.named_parameters() if p.dim() > 1)
    return {name: _xavier(shape[1], shape[0]) for name, shape in matrices}


def _recurrent(module: nn.RNNBase | nn.RNNCellBase) -> Rules:
    bound = Init("uniform", module.hidden_size**-0.5)
    return {name: bound for name, _ in module.named_parameters(recurse=False)}


KINDS: tuple[tuple[type[nn.Module], Callable[..., Rules]], ...] = (
    (nn.Linear, lambda module: _uniform(module.in_features)),
    (nn.Bilinear, lambda module: _uniform(module.in1_features)),
    (Convolution, _convolution),
    (nn.Embedding, _embedding),
    (nn.EmbeddingBag, _embedding),
    (nn.LayerNorm, _norm),
    (nn.GroupNorm, _norm),
    (nn.RMSNorm, _norm),
    (NormBase, _norm),  # BatchNorm, SyncBatchNorm, InstanceNorm
    (nn.Transformer, _transformer),
    (nn.MultiheadAttention, _attention),
    (nn.RNNBase, _recurrent),
    (nn.RNNCellBase, _recurrent),
    (nn.PReLU, lambda module: {"weight": Init("constant", float(module.init))}),
)


def default_rules(model: nn.Module) -> Rules:
    """The rules of all parameters and buffers in `model` that belong to modules of PyTorch, by their names."""
    by_name: Rules = {}
    for path, module in model.named_modules(remove_duplicate=False):  # an outer module's rule wins over inner ones
        for kind, rules in KINDS:
            own = type(module)
            same = all(getattr(own, reset, None) is getattr(kind, reset, None) for reset in RESETS)
            if isinstance(module, kind) and same:
                for name, rule in rules(module).items():
                    by_name.setdefault(f"{path}.{name}" if path else name, rule)
    return by_name
