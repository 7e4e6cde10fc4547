"""What does not go with fields that are split. None of it needs a process group."""

from __future__ import annotations

from torch import nn

from mmm.errors import ConfigError, config_field
from mmm.nn.dropout import Dropout
from mmm.nn.init import class_name
from mmm.parallel.plan import Field, Plan

DROPOUTS = (Dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def check_space(model: nn.Module, plan: Plan) -> None:
    """Check that a model can compute with fields that are split, as far as its plan and its modules say.

    Raises:
        ConfigError: its plan says of no field, or it has dropout.
    """
    style = f"{config_field('cp_style')} space"
    if plan.space is None:
        raise ConfigError(f"{style}: the plan of this model says nothing of fields (Plan.space); use another style")
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS) and module.p > 0:
            raise ConfigError(
                f"{style} with {name}, a {class_name(module)} of {module.p}: ranks would drop other elements than one "
                f"device does; use 0"
            )


def check_field(field: Field, shape: tuple[int, ...]) -> None:
    """Raises ConfigError if an input without its batch has another shape than the plan says."""
    if shape != field.shape:
        raise ConfigError(
            f"{config_field('cp_style')} space: inputs of {shape}, and the plan's `space.shape` is "
            f"{field.shape}: all have this one shape"
        )
