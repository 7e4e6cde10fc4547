"""The models of mmm that the proof trains."""

from mmm.models.cnn.plan import cnn_plan
from mmm.models.gpt.plan import gpt_plan
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.plan import vit_plan
from mmm_lab.parity.fixtures import (
    batch_norm,
    cnn,
    gpt,
    gpt_dropout,
    head_norm,
    llama,
    moe,
    plain_gpt,
    regression,
    transformer,
    vit,
)
from mmm_lab.parity.parity_model import ParityModel
from mmm_lab.parity.plans import batch_norm_plan, head_norm_plan, plain_gpt_plan, regression_plan

REGISTRY = {
    "transformer": ParityModel(
        model=transformer.small_model,
        plan=transformer_plan,
        batch=transformer.make_batch,
        documents=transformer.make_documents,
        chats=transformer.make_chats,
    ),
    "llama": ParityModel(model=llama.small_model, plan=transformer_plan, batch=transformer.make_batch),
    "moe": ParityModel(
        model=moe.small_model,
        plan=transformer_plan,
        batch=transformer.make_batch,
        documents=transformer.make_documents,
        after_step=moe.balance,
    ),
    "gpt": ParityModel(
        model=gpt.small_model,
        plan=gpt_plan,
        batch=transformer.make_batch,
        documents=transformer.make_documents,
        chats=transformer.make_chats,
    ),
    "gpt_dropout": ParityModel(model=gpt_dropout.small_model, plan=gpt_plan, batch=transformer.make_batch),
    "plain_gpt": ParityModel(model=plain_gpt.small_model, plan=plain_gpt_plan, batch=transformer.make_batch),
    "head_norm": ParityModel(model=head_norm.HeadNorm, plan=head_norm_plan, batch=head_norm.make_batch),
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
        least_microbatches=1,  # a micro-batch does not know the statistics of the batch
    ),
    "vit": ParityModel(model=vit.small_model, plan=vit_plan, batch=cnn.make_batch),
    "cnn": ParityModel(model=cnn.small_model, plan=cnn_plan, batch=cnn.make_batch),
}
