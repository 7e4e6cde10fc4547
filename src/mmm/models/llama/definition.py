"""What the package knows about the Llama of `model.py`, with experts if its sizes have some."""

from dataclasses import replace

from mmm.models.definition import ModelDef
from mmm.models.llama.costs import TransformerCosts
from mmm.models.llama.model import PRESETS, Transformer, TransformerConfig
from mmm.models.llama.names import NAMES
from mmm.models.llama.plan import transformer_plan
from mmm.models.llama.rules import transformer_rules
from mmm.nn.rope import RopeScaling

# Heads, widths and vocabulary are divisible by 8, and there are 8 modules to split into stages.
SMALL = TransformerConfig(
    dim=64,
    n_layers=6,
    n_heads=16,
    n_kv_heads=8,
    ffn_dim=96,
    vocab_size=96,
)
# What published Llamas have besides: one weight for embedding and output, and scaled rotary frequencies. A head has two
# frequencies here, and the lower one is scaled in part.
TIED = replace(
    SMALL,
    norm_eps=1e-6,
    rope_theta=20.0,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32),
    tie_word_embeddings=True,
)
ROUTED = TransformerConfig(
    dim=32,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=64,
    vocab_size=96,
    n_experts=8,
    expert_dim=24,
)
MIXTRAL = replace(ROUTED, softmax_router=True)
# The window is shorter than a sequence.
MISTRAL = replace(SMALL, n_layers=2, n_kv_heads=4, window=7)
QWEN2 = replace(SMALL, n_layers=2, n_kv_heads=4, qkv_bias=True)

MODEL = ModelDef(
    name="llama",
    program="mmm.trainer.lm",
    config=TransformerConfig,
    # The first preset is the default.
    presets={"small": PRESETS["small"], **PRESETS},
    build=Transformer,
    plan=transformer_plan,
    rules=transformer_rules,
    costs=TransformerCosts(),
    small={
        "transformer": SMALL,
        "llama": TIED,
        "moe": ROUTED,
        "mixtral": MIXTRAL,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
    },
    names=NAMES,
)
