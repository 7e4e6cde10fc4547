"""Which models there are: those of the registry, and a user's own, which a module or a file has as ``PARITY``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm_lab.parity.layouts import OTHERS, read_matrix

if TYPE_CHECKING:
    from mmm_lab.parity.parity_model import ParityModel

# Read from the matrix, and not from the registry, which imports torch: the command answers without.
NAMES = tuple(name for name in read_matrix() if name != OTHERS)


def find(name: str) -> ParityModel:
    """Returns the model called `name`.

    Args:
        name: one of `NAMES`; or a module, ``mine.mlp_plan``, or its file below the working directory,
            ``mine/mlp_plan.py``, that has ``PARITY``.

    Raises:
        ConfigError: there is no such module, or it has no ``PARITY``.
    """
    if name in NAMES:
        from mmm_lab.parity.registry import REGISTRY

        return REGISTRY[name]
    from mmm_lab.parity.parity_model import ParityModel
    from mmm_verify.errors import UserError
    from mmm_verify.subject import load_object

    try:
        model = load_object(f"{name}:PARITY", "--model")
    except UserError as error:
        raise ConfigError(
            f"{error}; the models here are {', '.join(NAMES)}, and docs/models.md says how to add one"
        ) from None
    if not isinstance(model, ParityModel):
        raise ConfigError(f"--model {name}: its PARITY is no ParityModel(…); see docs/models.md")
    return model
