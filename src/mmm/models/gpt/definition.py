"""What the package knows about the GPT of `model.py`."""

from mmm.models.definition import ModelDef
from mmm.models.gpt.costs import GPTCosts
from mmm.models.gpt.model import GPT, PRESETS, GPTConfig
from mmm.models.gpt.names import NAMES
from mmm.models.gpt.plan import gpt_plan, gpt_rules

# Biases everywhere and the approximate GELU, as GPT-2 has them, and a vocabulary that no number of ranks divides.
# Attention's weights are not dropped, because cp does not allow it.
SMALL = GPTConfig(
    dim=64,
    n_layers=6,
    n_heads=8,
    vocab_size=97,
    block_size=32,
    dropout=0.1,
    attention_dropout=0.0,
    bias=True,
    tanh_gelu=True,
)
# No biases, every dropout that there is, and more positions than a sequence has tokens.
DROPPING = GPTConfig(
    dim=64,
    n_layers=4,
    n_heads=8,
    vocab_size=97,
    block_size=40,
    dropout=0.2,
)

MODEL = ModelDef(
    name="gpt",
    program="mmm.trainer.lm",
    config=GPTConfig,
    # The first preset is the default.
    presets={"shakespeare-cpu": PRESETS["shakespeare-cpu"], **PRESETS},
    build=GPT,
    plan=gpt_plan,
    rules=gpt_rules,
    costs=GPTCosts(),
    small={"gpt": SMALL, "gpt_dropout": DROPPING},
    names=NAMES,
    known_by="block_size",
    longest=lambda config: config.block_size,
)
