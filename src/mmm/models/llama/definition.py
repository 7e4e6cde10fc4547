"""The Llama of `model.py`, with experts where its sizes have some, as the package knows it."""

from mmm.models.definition import ModelDef
from mmm.models.llama.costs import TransformerCosts
from mmm.models.llama.model import PRESETS, Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan, transformer_rules

MODEL = ModelDef(
    name="llama",
    program="mmm.trainer.lm",
    config=TransformerConfig,
    presets={"small": PRESETS["small"], **PRESETS},
    build=Transformer,
    plan=transformer_plan,
    rules=transformer_rules,
    costs=TransformerCosts(),
)
