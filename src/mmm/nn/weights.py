"""Draws the initial weights of a model: which rule each parameter is drawn by (`mmm.nn.init`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from mmm.nn.defaults import default_rules
from mmm.nn.init import Init as Init
from mmm.nn.init import ShardBox, canonical_name, class_name, fill_all, full_box


def parameter_problems(model: nn.Module) -> list[str]:
    """One sentence about the parameters of `model` without a rule. Empty where there are none."""
    rules = InitRules(model)
    model_name = class_name(model)
    without_rule = []
    for name, _ in model.named_parameters():
        if rules.parameter(name) is None:
            without_rule.append(name)
    if not without_rule:
        return []
    parameters = _first(without_rule, "parameter")
    return [
        f"nothing says how {parameters} of {model_name} starts: give {model_name} a method "
        f'init_rule(name) that returns mmm.nn.weights.Init("normal", 0.02) or the like for it, and None for what '
        f"PyTorch's own modules hold"
    ]


def buffer_problems(model: nn.Module) -> list[str]:
    """One sentence about the buffers of `model` that have no values and no rule. Empty where there are none."""
    rules = InitRules(model)
    model_name = class_name(model)
    without_rule = []
    for name, buffer in model.named_buffers():
        if buffer.is_meta and rules.buffer(name, empty=True) is None:
            without_rule.append(name)
    if not without_rule:
        return []
    buffers = _first(without_rule, "buffer")
    return [
        f"{buffers} of {model_name} lies on the meta device, where it has no values: build the "
        f"model inside mmm.parallel.meta_parameters(), which leaves buffers on the CPU, instead of "
        f'torch.device("meta"); or give {model_name} a method buffer_rule(name) that returns '
        f'mmm.nn.weights.Init("constant", …) for it'
    ]


def _first(names: Sequence[str], kind: str) -> str:
    """The first name, and how many more there are."""
    text = f"{kind} {names[0]}"
    if len(names) > 1:
        text += f" (and {len(names) - 1} more)"
    return text


# Function of a tensor's name that says how it starts; None: that it does not know.
RuleOf = Callable[[str], Init | None]


class InitRules:
    """How the weights of `model` start: by its own rules, else by those for PyTorch's modules.

    A model may have two methods. ``init_rule("layers.0.ffn_norm.weight")`` is asked for each parameter. Where it is
    missing, or returns None, a module of PyTorch starts as PyTorch documents it (`mmm.nn.defaults`).
    ``buffer_rule("layers.0.moe.expert_bias")`` is asked for each buffer. Where it is missing, or returns None, a buffer
    keeps the values that the constructor gave it. There are two methods because rules for parameters end in "and all
    others", and these must not draw a mask.

    Attributes:
        names: the names of all parameters, in the order of the model; for one with several names the first.
        tied_aliases: maps each further name of a parameter to its first name, by which it is drawn.
    """

    def __init__(self, model: nn.Module) -> None:
        self.defaults: dict[str, Init] = {}
        for name, rule in default_rules(model).items():
            self.defaults[canonical_name(name)] = rule
        self.of_parameter: RuleOf = getattr(model, "init_rule", lambda name: None)
        self.of_buffer: RuleOf = getattr(model, "buffer_rule", lambda name: None)
        self.names: list[str] = []
        self.tied_aliases: dict[str, str] = {}
        first_names: dict[int, str] = {}
        for full_name, parameter in model.named_parameters(remove_duplicate=False):
            name = canonical_name(full_name)
            first_name = first_names.setdefault(id(parameter), name)
            if name == first_name:
                self.names.append(name)
            else:
                self.tied_aliases[name] = first_name

    def first_name(self, name: str) -> str:
        """The canonical name that a parameter is drawn by."""
        name = canonical_name(name)
        return self.tied_aliases.get(name, name)

    def parameter(self, name: str) -> Init | None:
        """The rule of a parameter; None where there is none."""
        name = self.first_name(name)
        return self.of_parameter(name) or self.defaults.get(name)

    def buffer(self, name: str, empty: bool) -> Init | None:
        """The rule of a buffer; None where it keeps its values.

        Args:
            empty: whether it has no values to keep.
        """
        name = canonical_name(name)
        rule = self.of_buffer(name)
        if rule is None and empty:
            rule = self.defaults.get(name)
        return rule


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
        model: as `InitRules` describes. Its parameters lie on their final device (not meta). Buffers are not sharded.
        seed: of the run.
        box_of: function that returns this rank's shard of a sharded parameter.
        local_of: function that returns the local tensor of a sharded parameter.
        empty: names of buffers that have memory and no values yet: they start as PyTorch's own modules do.
        device: the device that computes the elements, wherever they lie. None: each where it lies.
        rules: those of the full model, where `model` is one stage of it. None: those of `model`.

    Raises:
        ValueError: as `parameter_problems` says.
    """
    problems = parameter_problems(model)
    if problems:
        raise ValueError("; ".join(problems))
    if rules is None:
        rules = InitRules(model)
    drawn: list[tuple[str, Tensor, Init]] = []
    for name, parameter in model.named_parameters():
        rule = rules.parameter(name)
        if rule is not None:
            drawn.append((rules.first_name(name), parameter, rule))
    for name, buffer in model.named_buffers():
        rule = rules.buffer(name, name in empty)
        if rule is not None:
            drawn.append((name, buffer, rule))
    fill_all(drawn, seed, box_of, local_of, device)
