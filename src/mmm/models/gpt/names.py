"""GPT-2 in Hugging Face's files.

Their matrices are transposed, (in, out), as a convolution of one token has them ("Conv1D"). All queries, keys and
values come from one of them: the queries of all heads first, then the keys, then the values. Here they are by head
(`mmm.models.gpt.model`). The files of the published models leave out the prefix ``transformer``, and have masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmm.errors import CheckpointError
from mmm.models.gpt.model import GPTConfig
from mmm.models.keys import check_keys, check_number, read_counts
from mmm.models.names import HuggingFaceNames
from mmm.outside import short

# Our name → their name, of a layer's modules with a weight and a bias.
MODULES = {
    "attention_norm": "ln_1",
    "attention.wqkv": "attn.c_attn",
    "attention.wo": "attn.c_proj",
    "ffn_norm": "ln_2",
    "feed_forward.w1": "mlp.c_fc",
    "feed_forward.w2": "mlp.c_proj",
}
TENSORS = {
    "tok_embeddings.weight": "transformer.wte.weight",
    "pos_embeddings.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
for own_module, their_module in MODULES.items():
    for kind in ("weight", "bias"):
        TENSORS[f"layers.*.{own_module}.{kind}"] = f"transformer.h.*.{their_module}.{kind}"
# Fields of the sizes, and the keys of a config.json that must be there for them.
SIZES = {
    "dim": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
}
# Fractions that are dropped: of the embeddings, of what a block adds, of attention's weights.
DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
# Their name of an activation → whether it is the approximation.
GELUS = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
# The former name of n_positions; and what only models with another output use.
UNUSED = ("n_ctx", "summary_activation", "summary_first_dropout")


def read(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Read the sizes from a config.json. See `HuggingFaceNames.read`."""
    gelu = config["activation_function"]
    own_keys = (*SIZES.values(), *DROPOUTS, *UNUSED, "layer_norm_epsilon", "activation_function")
    check_keys(config, where, own_keys)
    sizes = read_counts(config, where, SIZES)
    for key in (*DROPOUTS, "layer_norm_epsilon"):
        check_number(key, config[key], where)
    embedded, added, weights = (float(config[key]) for key in DROPOUTS)
    if embedded != added:
        raise CheckpointError(
            f"{where}: embd_pdrop is {embedded} and resid_pdrop {added}, and here one fraction is both"
        )
    if config.get("n_inner") not in (None, 4 * sizes["dim"]):
        raise CheckpointError(f"{where}: n_inner is {short(config['n_inner'])}, and here it is 4 · n_embd")
    if config["tie_word_embeddings"] is not True:
        raise CheckpointError(f"{where}: tie_word_embeddings is not true, and here the output is the embedding")
    if gelu not in tuple(GELUS):
        known = ", ".join(GELUS)
        raise CheckpointError(f"{where}: activation_function is {short(gelu)}; those that are known are {known}")
    return {
        **sizes,
        "dropout": added,
        "attention_dropout": weights,
        "bias": True,
        "norm_eps": float(config["layer_norm_epsilon"]),
        "tanh_gelu": GELUS[gelu],
    }


def write(config: GPTConfig) -> dict[str, Any]:
    """Write the keys of a config.json. See `HuggingFaceNames.write`."""
    if not config.bias:
        raise CheckpointError(
            "the model has no biases, and their GPT-2 has: it cannot be exported; train one with --bias"
        )
    return {
        **{key: getattr(config, field) for field, key in SIZES.items()},
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.weights_dropout,
        "activation_function": "gelu_new" if config.tanh_gelu else "gelu",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": True,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
    }


NAMES = HuggingFaceNames(
    model_types=("gpt2",),
    tensors=TENSORS,
    prefix="transformer.",
    fused=("attention.wqkv.weight", "attention.wqkv.bias"),
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    longest="n_positions",
    defaults={
        "gpt2": {
            **dict.fromkeys(DROPOUTS, 0.1),
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 50_256,
        }
    },
    read=read,
    write=write,
)
