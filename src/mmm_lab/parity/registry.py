"""The models that the proof trains: the package's own, in small, and some that only the proof has."""

from __future__ import annotations

from functools import partial
from typing import Any

from mmm.models.definition import NAMES, ModelDef, find
from mmm_lab.parity.fixtures import balance, batch_norm, images, lora, plain_gpt, regression, tokens
from mmm_lab.parity.parity_model import ParityModel
from mmm_lab.parity.plans import batch_norm_plan, lora_plan, plain_gpt_plan, regression_plan


def of_definition(definition: ModelDef, sizes: Any) -> ParityModel:
    """Make a model of the package, with these sizes."""
    model = partial(definition.build, sizes)
    plan = partial(definition.plan, sizes)
    # Images are its inputs.
    if not definition.language:
        return ParityModel(model=model, plan=plan, batch=images.make_batch)
    return ParityModel(
        model=model,
        plan=plan,
        batch=tokens.make_batch,
        documents=tokens.make_documents,
        chats=tokens.make_chats,
        before_step=balance.balance,
    )


# The package's own models have the names of their small sizes: a model may have several.
REGISTRY = {
    **{
        name: of_definition(definition, sizes)
        for definition in map(find, NAMES)
        for name, sizes in definition.small.items()
    },
    "plain_gpt": ParityModel(model=plain_gpt.small_model, plan=plain_gpt_plan, batch=tokens.make_batch),
    "lora": ParityModel(
        model=lora.LoRATransformer,
        plan=lora_plan,
        batch=tokens.make_batch,
        documents=tokens.make_documents,
        chats=tokens.make_chats,
    ),
    "regression": ParityModel(
        model=regression.Regression,
        plan=regression_plan,
        batch=regression.make_batch,
        loss=regression.squared_error,
    ),
    "batch_norm": ParityModel(
        model=batch_norm.BatchNormNet,
        plan=batch_norm_plan,
        batch=batch_norm.make_batch,
        # A micro-batch does not know the statistics of the batch.
        least_microbatches=1,
    ),
}
