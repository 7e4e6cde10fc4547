"""Tiny models of the Llama family on disk, written by hand: what others write, and what their readers compute."""

from __future__ import annotations

import io
import json
import string
import struct
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# Sizes as Hugging Face names them.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 67,
    "rms_norm_eps": 1e-4,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 66,
    "torch_dtype": "float32",
    "transformers_version": "4.45.0",
}
QWEN3 = {**CONFIG, "model_type": "qwen3", "head_dim": 16}
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
}
# Each is a token.
CHARS = "\n !,.:;?" + string.ascii_uppercase + string.ascii_lowercase
# What a Mixtral and a Qwen3-MoE call the module of the experts, and the three matrices of one.
MIXTURES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
# What safetensors calls each dtype.
KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def tensors(config: dict = CONFIG, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights by the names of Hugging Face's files."""
    drawn = torch.Generator().manual_seed(seed)
    dim = config["hidden_size"]
    hidden = config["intermediate_size"]
    vocabulary = config["vocab_size"]
    head = config.get("head_dim", dim // config["num_attention_heads"])
    queries, kv = (head * config[f"num_{name}_heads"] for name in ("attention", "key_value"))

    def some(*shape: int) -> Tensor:
        scale = 0.3 if len(shape) > 1 else 0.1
        return ((len(shape) == 1) + scale * torch.randn(*shape, generator=drawn)).to(dtype)

    weights = {"model.embed_tokens.weight": some(vocabulary, dim), "model.norm.weight": some(dim)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        weights |= {
            f"{layer}input_layernorm.weight": some(dim),
            f"{layer}post_attention_layernorm.weight": some(dim),
            f"{layer}self_attn.q_proj.weight": some(queries, dim),
            f"{layer}self_attn.k_proj.weight": some(kv, dim),
            f"{layer}self_attn.v_proj.weight": some(kv, dim),
            f"{layer}self_attn.o_proj.weight": some(dim, queries),
        }
        names, experts = ("gate_proj", "up_proj", "down_proj"), [f"{layer}mlp."]
        if config["model_type"] in MIXTURES:
            module, names = MIXTURES[config["model_type"]]
            count = config.get("num_local_experts", config.get("num_experts"))
            weights[f"{layer}{module}.gate.weight"] = some(count, dim)
            experts = [f"{layer}{module}.experts.{expert}." for expert in range(count)]
            hidden = config.get("moe_intermediate_size", hidden)
        for expert in experts:
            shapes = ((hidden, dim), (hidden, dim), (dim, hidden))
            weights |= {f"{expert}{name}.weight": some(*shape) for name, shape in zip(names, shapes, strict=True)}
        if config["model_type"] == "qwen2":
            weights |= {f"{layer}self_attn.{name}_proj.bias": some(queries if name == "q" else kv) for name in "qkv"}
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            weights |= {f"{layer}self_attn.{name}_norm.weight": some(head) for name in "qk"}
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = some(vocabulary, dim)
    return weights


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A file in the format of safetensors: the length of a header, the header as JSON, the numbers of all tensors."""
    header = {}
    # Of the next tensor, in bytes behind the header.
    begin = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize
        offsets = [begin, begin + size]
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        begin += size
    text = json.dumps(header).encode()
    content = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def write_hugging_face(
    folder: Path, config: dict = CONFIG, weights: dict[str, Tensor] | None = None, files: int = 1
) -> Path:
    """A folder as `transformers` writes it, with a tokenizer of characters.

    Args:
        files: of tensors; with more than one there is an index.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"kind": "chars", "chars": CHARS}))
    weights = tensors(config) if weights is None else weights
    if files == 1:
        write_safetensors(folder / "model.safetensors", weights)
        return folder
    names = list(weights)
    parts = {f"model-{i + 1:05}-of-{files:05}.safetensors": names[i::files] for i in range(files)}
    for file, some in parts.items():
        write_safetensors(folder / file, {name: weights[name] for name in some})
    index = {"metadata": {}, "weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def logits(config: dict, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """What `transformers` computes, in float64: rotations of halves, and names of its own.

    Args:
        tokens: (batch, seq).
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    seq = tokens.shape[1]
    frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        frequencies = frequencies / scaling["factor"]
    # (seq, head_dim)
    angles = torch.arange(seq).double()[:, None] * torch.cat([frequencies, frequencies])
    above = torch.full((seq, seq), -torch.inf, dtype=torch.float64).triu(1)
    if config.get("sliding_window") and config["model_type"] in ("mistral", "mixtral"):
        above += torch.full_like(above, -torch.inf).tril(-config["sliding_window"])

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * w[name]

    def rotated(x: Tensor) -> Tensor:
        # (batch, heads, seq, head_dim)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def feed_forward(y: Tensor, begin: str, names: tuple[str, str, str]) -> Tensor:
        gate, up, down = (w[f"{begin}{name}.weight"] for name in names)
        return (F.silu(y @ gate.T) * (y @ up.T)) @ down.T

    def mixture(y: Tensor, layer: str) -> Tensor:
        """Every expert computes every token; all but the top ones of a token count 0."""
        module, names = MIXTURES[config["model_type"]]
        scores = (y @ w[f"{layer}{module}.gate.weight"].T).softmax(-1)
        least = scores.sort(-1, descending=True)[0][..., config["num_experts_per_tok"] - 1, None]
        scores = scores * (scores >= least)
        if config.get("norm_topk_prob", True):
            scores = scores / scores.sum(-1, keepdim=True)
        parts = [feed_forward(y, f"{layer}{module}.experts.{e}.", names) for e in range(scores.shape[-1])]
        return (torch.stack(parts, -1) * scores[..., None, :]).sum(-1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        y = norm(x, f"{layer}input_layernorm.weight")
        q, k, v = (
            (y @ w[f"{layer}self_attn.{name}_proj.weight"].T + w.get(f"{layer}self_attn.{name}_proj.bias", 0))
            .unflatten(-1, (-1, head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            q, k = norm(q, f"{layer}self_attn.q_norm.weight"), norm(k, f"{layer}self_attn.k_norm.weight")
        # What safetensors calls each dtype.
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = rotated(q) @ rotated(k).mT / head_dim**0.5 + above
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + out @ w[f"{layer}self_attn.o_proj.weight"].T
        y = norm(x, f"{layer}post_attention_layernorm.weight")
        if config["model_type"] in MIXTURES:
            x = x + mixture(y, layer)
        else:
            x = x + feed_forward(y, f"{layer}mlp.", ("gate_proj", "up_proj", "down_proj"))
    # What safetensors calls each dtype.
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def byte_bpe(special: tuple[str, ...] = (), post_processor: dict | None = None) -> bytes:
    """A tokenizer.json of Hugging Face's: 256 bytes, no merges, then special tokens from 256 on."""
    from tokenizers import pre_tokenizers

    vocab = {name: i for i, name in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    about = {
        "added_tokens": [{"id": vocab[name], "content": name, "special": True, **flags} for name in special],
        "pre_tokenizer": byte_level,
        "post_processor": post_processor,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return json.dumps(about).encode()


def sentencepiece_model(lines: list[str], **options: object) -> bytes:
    """A tokenizer.model that is trained on a few lines."""
    import sentencepiece

    model = io.BytesIO()
    options = {"hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
    return model.getvalue()


def begin_with(*names: str, first: int = 256) -> dict:
    """A post-processor that begins each text with these tokens, of the numbers from `first` on."""
    begin = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    one, two = ([{"Sequence": {"id": name, "type_id": i}}] for i, name in enumerate("AB"))
    special = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in enumerate(names, first)}
    return {"type": "TemplateProcessing", "single": begin + one, "pair": begin + one + two, "special_tokens": special}
