"""The models that the proof tries, in small: the package's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from mmm.models.definition import NAMES, ModelDef, find
from mmm.nn.experts import MixtureOfExperts
from mmm_lab.parity import batches
from mmm_lab.parity.parity_model import ParityModel

# As `mmm.parallel.ep.balance.balance_experts` has it.
BALANCE_RATE = 1e-3


def of_definition(definition: ModelDef, sizes: Any) -> ParityModel:
    """Make a model of the package, with these sizes."""
    model = partial(definition.build, sizes)
    plan = partial(definition.plan, sizes)
    # Images are its inputs.
    if not definition.language:
        return ParityModel(model=model, plan=plan, batch=batches.make_images)
    return ParityModel(
        model=model,
        plan=plan,
        batch=batches.make_tokens,
        documents=batches.make_documents,
        chats=batches.make_chats,
        before_step=balance,
    )


@torch.no_grad()
def balance(model: nn.Module) -> None:
    """Make experts that had more than their share of the tokens less likely, and the others more, as on a mesh."""
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            load = layer.tokens_per_expert  # (experts,)
            # No step has been taken yet.
            if load is None:
                continue
            # In whole numbers: the share is the sum over the number of experts.
            layer.move_bias(BALANCE_RATE, (load.sum() - load * len(load)).sign())


# They have the names of their small sizes: a model may have several.
REGISTRY = {
    name: of_definition(definition, sizes)
    for definition in map(find, NAMES)
    for name, sizes in definition.small.items()
}
