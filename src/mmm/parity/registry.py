"""The models of mmm that the proof trains."""

from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.plans.vit import vit_plan
from mmm.parity.fixtures import (
    batch_norm,
    branches,
    cnn,
    gpt,
    head_norm,
    llama,
    moe,
    regression,
    transformer,
    vit,
)
from mmm.parity.fixtures.plans.batch_norm import batch_norm_plan
from mmm.parity.fixtures.plans.branches import branches_plan
from mmm.parity.fixtures.plans.gpt import gpt_plan
from mmm.parity.fixtures.plans.head_norm import head_norm_plan
from mmm.parity.fixtures.plans.regression import regression_plan
from mmm.parity.parity_model import ParityModel

REGISTRY = {
    "transformer": ParityModel(
        model=transformer.small_model,
        plan=transformer_plan,
        batch=transformer.make_batch,
        documents=transformer.make_documents,
    ),
    "llama": ParityModel(model=llama.small_model, plan=transformer_plan, batch=transformer.make_batch),
    "moe": ParityModel(
        model=moe.small_model,
        plan=transformer_plan,
        batch=transformer.make_batch,
        documents=transformer.make_documents,
        after_step=moe.balance,
    ),
    "gpt": ParityModel(model=gpt.small_model, plan=gpt_plan, batch=transformer.make_batch),
    "head_norm": ParityModel(model=head_norm.small_model, plan=head_norm_plan, batch=head_norm.make_batch),
    "regression": ParityModel(
        model=regression.small_model,
        plan=regression_plan,
        batch=regression.make_batch,
        loss=regression.squared_error,
    ),
    "branches": ParityModel(
        model=branches.small_model,
        plan=branches_plan,
        batch=branches.make_batch,
        loss=regression.squared_error,
    ),
    "batch_norm": ParityModel(
        model=batch_norm.small_model,
        plan=batch_norm_plan,
        batch=batch_norm.make_batch,
        least_microbatches=1,  # a micro-batch does not know the statistics of the batch
    ),
    "vit": ParityModel(model=vit.small_model, plan=vit_plan, batch=cnn.make_batch),
    "cnn": ParityModel(model=cnn.small_model, plan=cnn_plan, batch=cnn.make_batch),
}
