"""The ViT of `model.py`, as the package knows it."""

from mmm.models.definition import ModelDef, image_sample
from mmm.models.vit.costs import ViTCosts
from mmm.models.vit.model import PRESETS, ViT, ViTConfig
from mmm.models.vit.plan import vit_plan, vit_rules

MODEL = ModelDef(
    name="vit",
    program="mmm.trainer.vit",
    config=ViTConfig,
    presets=PRESETS,
    build=ViT,
    plan=vit_plan,
    rules=vit_rules,
    costs=ViTCosts(),
    sample=image_sample,
    language=False,
    tokens=lambda config, seq_length: config.patches,
)
