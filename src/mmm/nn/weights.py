"""Initial weights of a model: which rule each parameter is drawn by (`mmm.nn.draw`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from mmm.nn.defaults import default_rules
from mmm.nn.draw import Init as Init
from mmm.nn.draw import ShardBox, canonical_name, class_name, fill_all, full_box


def parameter_problems(model: nn.Module) -> list[str]:
    """One sentence about the parameters of `model` without a rule; empty when there are none."""
    rule_of, of = InitRules(model), class_name(model)
    lacking = [name for name, _ in model.named_parameters() if rule_of.parameter(name) is None]
    return lacking and [
        f"nothing says how {_first(lacking, 'parameter')} of {of} starts: give {of} a method init_rule(name) that "
        f'returns mmm.nn.weights.Init("normal", 0.02) or the like for it, and None for what PyTorch\'s own modules '
        f"hold"
    ]


def buffer_problems(model: nn.Module) -> list[str]:
    """One sentence about the buffers of `model` that have no values and no rule; empty when there are none."""
    rule_of, of = InitRules(model), class_name(model)
    lacking = [name for name, buffer in model.named_buffers() if buffer.is_meta and rule_of.buffer(name, True) is None]
    return lacking and [
        f"{_first(lacking, 'buffer')} of {of} lies on the meta device, where it has no values: build the model inside "
        f'mmm.parallel.meta_parameters(), which leaves buffers on the CPU, instead of torch.device("meta"); or give '
        f'{of} a method buffer_rule(name) that returns mmm.nn.weights.Init("constant", …) for it'
    ]


def _first(names: Sequence[str], what: str) -> str:
    return f"{what} {names[0]}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


class InitRules:
    """How the weights of `model` start: by its own rules, else by those of PyTorch's modules.

    A model may have two methods. ``init_rule("layers.0.ffn_norm.weight")`` is asked for each parameter. Where it is
    missing, or returns None, a module of PyTorch starts as PyTorch documents it (`mmm.nn.defaults`).
    ``buffer_rule("layers.0.moe.expert_bias")`` is asked for each buffer. Where it is missing, or returns None, a buffer
    keeps the values that the constructor gave it. The methods are two because rules for parameters end in "and all
    others", which must not draw a mask.

    Attributes:
        names: of all parameters; of one with several names the first.
        tied_aliases: of a parameter with several names, each further name → the first, by which it is drawn.
    """

    def __init__(self, model: nn.Module) -> None:
        self.defaults = {canonical_name(name): rule for name, rule in default_rules(model).items()}
        self.of_parameter: Callable[[str], Init | None] = getattr(model, "init_rule", lambda name: None)
        self.of_buffer: Callable[[str], Init | None] = getattr(model, "buffer_rule", lambda name: None)
        named = [(canonical_name(name), id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
        firsts = {of: name for name, of in reversed(named)}
        self.names = [name for name, of in named if name == firsts[of]]
        self.tied_aliases = {name: firsts[of] for name, of in named if name != firsts[of]}

    def first_name(self, name: str) -> str:
        name = canonical_name(name)
        return self.tied_aliases.get(name, name)

    def parameter(self, name: str) -> Init | None:
        name = self.first_name(name)
        return self.of_parameter(name) or self.defaults.get(name)

    def buffer(self, name: str, empty: bool) -> Init | None:
        """The rule of a buffer; None where it keeps its values. `empty`: it has no values to keep."""
        name = canonical_name(name)
        return self.of_buffer(name) or (self.defaults.get(name) if empty else None)


def initialize(
    model: nn.Module,
    seed: int,
    box_of: Callable[[Tensor], ShardBox] = full_box,
    local_of: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    empty: Collection[str] = (),
    device: torch.device | None = None,
    rules: InitRules | None = None,
) -> None:
    """Draw every parameter of `model`, in place. Buffers keep their values, except those that the model has a rule for.

    Args:
        model: see `InitRules`; parameters lie on their final device (not meta). Buffers are not sharded.
        seed: of the run.
        box_of, local_of: of a sharded parameter, this rank's shard and its local tensor.
        empty: names of buffers that have memory and no values yet: they start as PyTorch's own modules do.
        device: computes the elements, wherever they lie. None: each where it lies.
        rules: of the full model, where `model` is one stage of it. None: of `model`.

    Raises:
        ValueError: as `parameter_problems` says.
    """
    if wrong := parameter_problems(model):
        raise ValueError("; ".join(wrong))
    rule_of = rules or InitRules(model)
    parameters = [(rule_of.first_name(name), p, rule_of.parameter(name)) for name, p in model.named_parameters()]
    buffers = [(name, buffer, rule_of.buffer(name, name in empty)) for name, buffer in model.named_buffers()]
    drawn = [(name, tensor, rule) for name, tensor, rule in (*parameters, *buffers) if rule is not None]
    fill_all(drawn, seed, box_of, local_of, device)
