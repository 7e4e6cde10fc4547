"""What the package knows about the Swin of `model.py`."""

from mmm.models.definition import ModelDef, image_sample
from mmm.models.swin.costs import SwinCosts
from mmm.models.swin.model import PRESETS, Swin, SwinConfig
from mmm.models.swin.plan import swin_plan
from mmm.models.vit.plan import vit_rules

# There are 8 modules to split into stages. Heads and widths are divisible by 8. Each pixel is a place. 3 ranks of cp do
# not divide the 4 rows of windows.
SMALL = SwinConfig(
    image_size=12,
    patch_size=1,
    channels=1,
    classes=10,
    dim=32,
    n_layers=6,
    n_heads=8,
    window=3,
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
