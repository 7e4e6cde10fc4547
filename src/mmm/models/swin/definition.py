"""What the package knows about the Swin of `model.py`."""

from mmm.models.definition import ModelDef, image_sample
from mmm.models.swin.costs import SwinCosts
from mmm.models.swin.model import PRESETS, Swin, SwinConfig
from mmm.models.swin.plan import swin_plan
from mmm.models.vit.plan import vit_rules

# There are 8 modules to split into stages. Heads and widths are divisible by 8. The field has 6 × 6 places, which are
# 3 × 3 windows: shifted, one is whole in every direction.
SMALL = SwinConfig(
    image_size=12,
    patch_size=2,
    channels=1,
    classes=10,
    dim=32,
    n_layers=6,
    n_heads=8,
    window=2,
    mlp_dim=64,
)

MODEL = ModelDef(
    name="swin",
    program="mmm.trainer.vit",
    config=SwinConfig,
    presets=PRESETS,
    build=Swin,
    plan=swin_plan,
    rules=vit_rules,
    costs=SwinCosts(),
    small={"swin": SMALL},
    sample=image_sample,
    language=False,
    tokens=lambda config, seq_length: config.patches,
)
