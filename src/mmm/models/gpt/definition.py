"""The GPT of `model.py`, as the package knows it."""

from mmm.models.definition import ModelDef
from mmm.models.gpt.costs import GPTCosts
from mmm.models.gpt.model import GPT, PRESETS, GPTConfig
from mmm.models.gpt.plan import gpt_plan, gpt_rules

MODEL = ModelDef(
    name="gpt",
    program="mmm.trainer.lm",
    config=GPTConfig,
    presets={"shakespeare-cpu": PRESETS["shakespeare-cpu"], **PRESETS},
    build=GPT,
    plan=gpt_plan,
    rules=gpt_rules,
    costs=GPTCosts(),
    longest=lambda config: config.block_size,
)
