"""The Qwen3 of `model.py`, as the package knows it."""

from mmm.models.definition import ModelDef
from mmm.models.llama.plan import transformer_rules
from mmm.models.qwen3.costs import Qwen3Costs
from mmm.models.qwen3.model import PRESETS, Qwen3, Qwen3Config
from mmm.models.qwen3.plan import qwen3_plan

MODEL = ModelDef(
    name="qwen3",
    program="mmm.trainer.lm",
    config=Qwen3Config,
    presets=PRESETS,
    build=Qwen3,
    plan=qwen3_plan,
    rules=transformer_rules,
    costs=Qwen3Costs(),
)
