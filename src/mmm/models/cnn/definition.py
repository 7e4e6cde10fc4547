"""The MNIST net of `model.py`, as the package knows it."""

from mmm.models.cnn.costs import CNNCosts
from mmm.models.cnn.model import CNN, CNNConfig
from mmm.models.cnn.plan import cnn_plan, cnn_rules
from mmm.models.definition import ModelDef, image_sample

# With dropout: 4 parts to split into stages; hidden divides by 8.
SMALL = CNNConfig(image_size=12, width1=4, width2=8, hidden=32)

MODEL = ModelDef(
    name="cnn",
    program="mmm.trainer.cnn",
    config=CNNConfig,
    presets={"mnist": CNNConfig()},
    build=CNN,
    plan=cnn_plan,
    rules=cnn_rules,
    costs=CNNCosts(),
    small={"cnn": SMALL},
    sample=image_sample,
    language=False,
    tokens=lambda config, seq_length: 1,
)
