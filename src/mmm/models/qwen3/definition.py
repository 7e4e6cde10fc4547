"""What the package knows about the Qwen3 of `model.py`."""

from dataclasses import replace

from mmm.models.definition import ModelDef
from mmm.models.llama.rules import transformer_rules
from mmm.models.qwen3.costs import Qwen3Costs
from mmm.models.qwen3.model import PRESETS, Qwen3, Qwen3Config
from mmm.models.qwen3.names import NAMES
from mmm.models.qwen3.plan import qwen3_plan

# The heads together are wider than the residual stream. Each of the 4 key/value heads serves two query heads.
SMALL = Qwen3Config(
    dim=48,
    n_layers=6,
    n_heads=8,
    n_kv_heads=4,
    head_dim=16,
    vocab_size=96,
    ffn_dim=96,
    rope_theta=20.0,
)
# The weights of a token's experts add up to less than 1.
ROUTED = replace(SMALL, n_layers=2, n_experts=8, top_k=2, expert_dim=24)

MODEL = ModelDef(
    name="qwen3",
    program="mmm.trainer.lm",
    config=Qwen3Config,
    presets=PRESETS,
    build=Qwen3,
    plan=qwen3_plan,
    rules=transformer_rules,
    costs=Qwen3Costs(),
    small={"qwen3": SMALL, "qwen3_moe": ROUTED},
    names=NAMES,
    known_by="head_dim",
)
