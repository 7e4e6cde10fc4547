"""What the package knows about the MNIST net of `model.py`."""

from mmm.models.cnn.costs import CNNCosts
from mmm.models.cnn.model import CNN, CNNConfig
from mmm.models.cnn.plan import cnn_plan, cnn_rules
from mmm.models.definition import ModelDef, image_sample

# With dropout. There are 4 modules to split into stages, and hidden is divisible by 8.
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
    # An image is not a sequence: it counts as one token.
    tokens=lambda config, seq_length: 1,
)
