"""What the package knows about the ViT of `model.py`."""

from mmm.models.definition import ModelDef, image_sample
from mmm.models.vit.costs import ViTCosts
from mmm.models.vit.model import PRESETS, ViT, ViTConfig
from mmm.models.vit.plan import vit_plan, vit_rules

# There are 8 modules to split into stages. Heads and widths are divisible by 8, the 9 patches are not.
SMALL = ViTConfig(
    image_size=12,
    patch_size=4,
    channels=1,
    classes=10,
    dim=32,
    n_layers=6,
    n_heads=8,
    mlp_dim=64,
)

MODEL = ModelDef(
    name="vit",
    program="mmm.trainer.vit",
    config=ViTConfig,
    presets=PRESETS,
    build=ViT,
    plan=vit_plan,
    rules=vit_rules,
    costs=ViTCosts(),
    small={"vit": SMALL},
    sample=image_sample,
    language=False,
    tokens=lambda config, seq_length: config.patches,
)
