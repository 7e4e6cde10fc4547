"""Weights of GPT-2 and of the Llama family: read in slices, whoever has written them; rotations of halves and of pairs;
which tensors and keys a folder means, as transformers takes them; refusals."""

import json
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mmm.checkpoint.manifest import read_manifest
from mmm.errors import CheckpointError
from mmm.nn.rope import RopeScaling
from mmm.weights.hugging_face import export
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from mmm.weights.weights import config_of
from support import gpt2
from support.gpt2 import GPT2
from support.llamas import (
    CONFIG,
    MIXTRAL,
    QWEN3,
    QWEN3_MOE,
    logits,
    tensors,
    write_hugging_face,
    write_safetensors,
)

TOKENS = torch.arange(40).view(2, 20) * 7 % 67
QWEN2 = {**CONFIG, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}
MISTRAL = {**CONFIG, "model_type": "mistral", "sliding_window": 7}
FAMILY = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, norms": {**QWEN3_MOE, "norm_topk_prob": True},
    "gpt2": GPT2,
}
TIED = {**CONFIG, "tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


def drawn(config, dtype=torch.float32):
    """Random weights of a model of that kind, by the names of Hugging Face's files."""
    return gpt2.tensors(dtype) if config["model_type"] == "gpt2" else tensors(config, dtype=dtype)


def values(weights):
    return {name: tensor.detach() for name, tensor in weights.items()}


def full(weights):
    return {name: weights.read_full(name) for name in weights.entries}


def model_of(weights):
    model = weights.definition.build(config_of(weights)).double()
    state = full(weights)
    if model.config.tie_word_embeddings:
        state["output.weight"] = state["tok_embeddings.weight"]
    model.load_state_dict(state)
    return model


@pytest.fixture
def folder(tmp_path):
    return write_hugging_face(tmp_path / "hf", files=3)


@pytest.fixture
def imported(folder, tmp_path):
    write_own(open_weights(folder), tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize("config", [CONFIG, TIED, *FAMILY.values()], ids=["plain", "tied, scaled", *FAMILY])
@pytest.mark.parametrize("files", [1, 2])
def test_the_model_computes_what_transformers_does(tmp_path, config, files):
    """And its gradients are theirs: of every expert, and of the router, to which a wrong weight of a choice leads."""
    weights = {name: tensor.requires_grad_() for name, tensor in drawn(config, torch.float64).items()}
    read = open_weights(write_hugging_face(tmp_path / "hf", config, values(weights), files))
    ours = model_of(read)
    theirs = gpt2.logits(weights, TOKENS) if config is GPT2 else logits(config, weights, TOKENS)
    computed = ours(TOKENS)
    torch.testing.assert_close(computed, theirs, rtol=1e-11, atol=1e-11)
    for logit in (computed, theirs):
        F.cross_entropy(logit.flatten(0, 1), TOKENS.flatten()).backward()
    # Written and read like weights, they have our names and order.
    gradients = {name: tensor.grad for name, tensor in weights.items()}
    expected = open_weights(write_hugging_face(tmp_path / "gradients", config, gradients))
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.read_full(name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", [CONFIG, QWEN3_MOE, GPT2], ids=["llama", "qwen3_moe", "gpt2"])
def test_any_slice(tmp_path, config):
    """Heads begin and end anywhere in a slice: their rows have another order in the files of transformers."""
    folder = write_hugging_face(tmp_path / "hf", config, drawn(config), files=3)
    write_own(open_weights(folder), tmp_path / "own")
    generator = random.Random(0)
    expected = full(open_weights(folder))
    for path in (folder, tmp_path / "own"):
        weights = open_weights(path)
        for name, tensor in expected.items():
            ends = [sorted(generator.choices(range(size + 1), k=2)) for size in tensor.shape]
            start = [first for first, _ in ends]
            length = [end - first for first, end in ends]
            slices = tuple(slice(first, end) for first, end in ends)
            assert torch.equal(weights.read(name, start, length), tensor[slices]), (path, name, ends)


def test_there_and_back(folder, imported, tmp_path):
    export(open_weights(imported), tmp_path / "again", None, 20_000, print)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 2
    assert max(path.stat().st_size for path in (tmp_path / "again").glob("*.safetensors")) < 25_000
    first, again, own_again = open_weights(folder), open_weights(tmp_path / "again"), open_weights(imported)
    for other in (again, own_again):
        assert config_of(other) == config_of(first)
        assert (other.metadata.block, other.metadata.eos) == (64, (66,))
        originals, copies = full(first), full(other)
        assert all(torch.equal(originals[name], copies[name]) for name in originals)
    assert own_again.metadata == first.metadata


@pytest.mark.parametrize("config", FAMILY.values(), ids=FAMILY)
def test_the_family_there_and_back(tmp_path, config):
    """Through a checkpoint of this package, which knows the model by its sizes: to the bit, and by the same names."""
    first = drawn(config)
    write_own(open_weights(write_hugging_face(tmp_path / "hf", config, first)), tmp_path / "own")
    own = open_weights(tmp_path / "own")
    assert config_of(own) == config_of(open_weights(tmp_path / "hf"))
    # Without the folder that it came from, as of drawn weights, and with it.
    for name, metadata in (("drawn", replace(own.metadata, descriptions={})), ("back", own.metadata)):
        own.metadata = metadata
        export(own, tmp_path / name, None, 10**9, print)
        assert config_of(open_weights(tmp_path / name)) == config_of(own)
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["model_type"] == config["model_type"]
        again = load_file(tmp_path / name / "model.safetensors")
        assert set(again) == set(first)
        assert all(torch.equal(again[tensor], first[tensor]) for tensor in first)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_export_in_another_dtype(imported, tmp_path, kind):
    export(open_weights(imported), tmp_path / "b", kind, 10**9, print)
    read, before = full(open_weights(tmp_path / "b")), full(open_weights(imported))
    assert all(torch.equal(read[name], before[name].to(kind)) for name in before)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == str(kind).removeprefix("torch.")


def without(name):
    return {key: tensor for key, tensor in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({"sliding_rope": 3}, None, "sliding_rope (3)"),
        ({"attention_bias": True}, None, "attention_bias"),
        ({"hidden_act": "gelu"}, None, "hidden_act is 'gelu'"),
        ({"model_type": "gemma"}, None, "model_type is 'gemma'"),
        ({"head_dim": 16}, None, "self_attn.q_proj.weight is 32×32, and the sizes of the model make it 64×32"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, None, "rope_type"),
        ({"rope_scaling": {"factor": 8.0}}, None, "rope_type"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, None, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}, None, "partial_rotary"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, None, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 5e5}}, None, "rope_parameters"),
        ({"rope_scaling": "x"}, None, "rope_scaling"),
        ({"tie_word_embeddings": "false"}, None, "tie_word_embeddings"),
        ({"rope_theta": "abc"}, None, "rope_theta"),
        ({"rope_theta": 0}, None, "rope_theta"),
        ({"num_hidden_layers": 10**9}, None, "has 21 tensors, which are too few for 1000000000 layers"),
        ({"rms_norm_eps": None}, None, "rms_norm_eps"),
        ({"num_key_value_heads": "2"}, None, "num_key_value_heads is '2'"),
        ({"eos_token_id": "66"}, None, "eos_token_id is '66'"),
        ({"vocab_size": 68}, None, "model.embed_tokens.weight is 67×32"),
        ({"hidden_size": "32"}, None, "hidden_size is '32'"),
        ({}, without("model.norm.weight"), "lacks the tensor model.norm.weight"),
        ({}, {**tensors(), "model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "unknown tensor model.layers.0."),
        ({}, {**tensors(), "model.norm.weight": torch.ones(32, dtype=torch.int64)}, "dtype torch.int64"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_what_is_refused(tmp_path, config, weights, message):
    write_hugging_face(tmp_path / "hf", {**CONFIG, **config}, weights if weights is not None else tensors())
    with pytest.raises(CheckpointError) as refused:
        config_of(open_weights(tmp_path / "hf"))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPT2, "n_inner": 96}, "n_inner is 96"),
        ({**GPT2, "activation_function": "relu"}, "activation_function is 'relu'"),
        ({**GPT2, "resid_pdrop": 0.1}, "embd_pdrop is 0.0 and resid_pdrop 0.1"),
        ({**GPT2, "attn_pdrop": "0"}, "attn_pdrop is '0'"),
        ({**GPT2, "n_head": 2.0}, "n_head is 2.0"),
        ({**GPT2, "tie_word_embeddings": False}, "tie_word_embeddings is not true"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({**MIXTRAL, "router_jitter_noise": 0.01}, "router_jitter_noise is 0.01"),
        ({**MIXTRAL, "output_router_logits": True}, "output_router_logits is True"),
        (
            {**MIXTRAL, "num_local_experts": 7},
            "block_sparse_moe.gate.weight is 6×32, and the sizes of the model make it 7×32",
        ),
        ({**MIXTRAL, "num_experts_per_tok": 7}, "top_k is 7"),
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({**QWEN3_MOE, "norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({**QWEN3_MOE, "shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size (8)"),
        ({**QWEN3_MOE, "use_sliding_window": True}, "use_sliding_window is True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_of_a_gpt2_and_of_mixtures(tmp_path, config, message):
    like = next(known for known in (GPT2, MIXTRAL, QWEN3_MOE) if known["model_type"] == config["model_type"])
    with pytest.raises(CheckpointError) as refused:
        config_of(open_weights(write_hugging_face(tmp_path / "hf", config, drawn(like))))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("experts.2.w1.weight", None, "model.layers.0.block_sparse_moe.experts.2.w1.weight is missing"),
        ("experts.3.w2.weight", torch.ones(32, 47), "experts.3.w2.weight has another shape or dtype than that of expe"),
    ],
)
def test_an_expert_that_is_missing_or_of_another_shape(tmp_path, name, tensor, message):
    """Stacked all the same, the experts after it would have its number."""
    name, weights = f"model.layers.0.block_sparse_moe.{name}", drawn(MIXTRAL)
    weights = {key: tensor if key == name else own for key, own in weights.items()}
    weights = {key: own for key, own in weights.items() if own is not None}
    with pytest.raises(CheckpointError) as refused:
        open_weights(write_hugging_face(tmp_path / "hf", MIXTRAL, weights))
    assert message in str(refused.value)


def test_the_published_gpt2_has_masks_and_no_prefix(tmp_path):
    weights = drawn(GPT2)
    expected = full(open_weights(write_hugging_face(tmp_path / "new", GPT2, weights)))
    published = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    published |= {"h.0.attn.bias": torch.ones(1, 1, 40, 40), "lm_head.weight": weights["transformer.wte.weight"]}
    read_back = full(open_weights(write_hugging_face(tmp_path / "old", GPT2, published)))
    assert all(torch.equal(read_back[name], tensor) for name, tensor in expected.items())
    published["lm_head.weight"] = 2 * published["lm_head.weight"]
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight is not transformer.wte.weight, and a gpt has one for both"
    ):
        open_weights(write_hugging_face(tmp_path / "untied", GPT2, published))


def test_a_mixture_as_transformers_5_names_its_experts(tmp_path):
    """It writes num_local_experts, where the published files have num_experts."""
    config = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    path = write_hugging_face(tmp_path / "hf", {**config, "num_local_experts": 6}, drawn(QWEN3_MOE))
    assert config_of(open_weights(path)).n_experts == 6


def test_a_missing_size(tmp_path):
    write_hugging_face(tmp_path / "hf")
    config = {key: value for key, value in CONFIG.items() if key != "intermediate_size"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lacks intermediate_size"):
        open_weights(tmp_path / "hf")


def test_a_scaling_said_twice_by_two_names(tmp_path):
    linear = {"factor": 2.0}
    both = {"rope_scaling": {"type": "linear", **linear}, "rope_parameters": {"rope_type": "linear", **linear}}
    path = write_hugging_face(tmp_path / "hf", {**CONFIG, **both})
    assert config_of(open_weights(path)).rope_scaling == RopeScaling("linear", 2.0)


def test_files_that_are_damaged(folder, imported):
    path = sorted(folder.glob("*.safetensors"))[0]
    content = path.read_bytes()
    for wrong, message in (
        (content[:-3], "is truncated or damaged"),
        (content[:40], "is not a safetensors file, or is truncated"),
        (b"\0" * 100, "not a safetensors file"),
        (content.replace(b'"F32"', b'"Q32"', 1), "not a safetensors file"),
        (content.replace(b'"F32"', b'"U32"', 1), "is of dtype U32, which is not one of"),
        (content.replace(b"[32]", b"[31]", 1), "damaged"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=message):
            open_weights(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        open_weights(folder)
    assert open_weights(imported).check() is None
    file = next(imported.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert "is damaged: its checksum" in open_weights(imported).check()


@pytest.mark.parametrize(
    "about",
    [
        {"block": "1024"},
        {"base": ["x"]},
        {"chat": "text"},
        {"chat": {"template": "", "tokens": {}}},
        {"chat": {"template": {}, "special_tokens": {}}},
        {"chat": {"template": "\ud800", "special_tokens": {}}},
        {"chat": {"template": "", "special_tokens": "a/b"}},
        {"chat": {"template": "", "special_tokens": {"bos_token": 1}}},
    ],
)
def test_a_manifest_that_says_something_else_of_the_model(imported, about):
    """With a right checksum, as by somebody who has changed it."""
    manifest = read_manifest(imported)
    replace(manifest, about=manifest.about | about).write(imported)
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged: its (block|chat)"):
        open_weights(imported)


def test_folders_without_weights(tmp_path, imported):
    with pytest.raises(CheckpointError, match="No such file"):
        open_weights(tmp_path / "gone")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model.gguf"):
        open_weights(tmp_path / "model.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no weights are there; give a checkpoint"):
        open_weights(tmp_path / "empty")
    weights = open_weights(imported)
    with pytest.raises(CheckpointError, match="is there already"):
        export(weights, tmp_path / "empty", None, 10**9, print)
    with pytest.raises(CheckpointError, match="is there already"):
        write_own(weights, tmp_path / "empty")
    weights.sizes["n_experts"] = 4
    with pytest.raises(CheckpointError, match="n_experts is 4"):
        export(weights, tmp_path / "moe", None, 10**9, print)


TIED_ALONE = {**CONFIG, "tie_word_embeddings": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def assert_computes(path, weights):
    with torch.no_grad():
        ours = model_of(open_weights(path))(TOKENS)
    torch.testing.assert_close(ours, logits(CONFIG, weights, TOKENS), rtol=1e-11, atol=1e-11)


def test_tied_by_the_config_but_not_by_the_file(tmp_path):
    weights = tensors(CONFIG)
    assert_computes(write_hugging_face(tmp_path / "hf", TIED_ALONE, weights), weights)
    read = open_weights(tmp_path / "hf")
    assert not read.sizes["tie_word_embeddings"]
    assert read.metadata.notes == (f"tie_word_embeddings is true, but {HEAD} is not {EMBEDDING}: the two are not tied",)


def test_tied_and_there_twice(tmp_path):
    weights = tensors(TIED_ALONE)
    twice = write_hugging_face(tmp_path / "twice", TIED_ALONE, {**weights, HEAD: weights[EMBEDDING].clone()})
    only_head = {HEAD if name == EMBEDDING else name: tensor for name, tensor in weights.items()}
    for path in (twice, write_hugging_face(tmp_path / "head", TIED_ALONE, only_head, files=2)):
        assert_computes(path, weights)
        assert open_weights(path).sizes["tie_word_embeddings"]
        assert open_weights(path).metadata.notes == ()


def test_one_file_is_taken_before_an_index(tmp_path):
    new, old = tensors(CONFIG, seed=1), tensors(CONFIG)
    write_hugging_face(tmp_path / "hf", CONFIG, old, files=2)
    write_safetensors(tmp_path / "hf" / "model.safetensors", new)
    assert_computes(tmp_path / "hf", new)
    assert open_weights(tmp_path / "hf").metadata.notes[0].startswith("model.safetensors.index.json is passed over")


def test_other_files_beside_the_one(tmp_path):
    """As consolidated.safetensors, of Meta's names, which some folders have too."""
    write_hugging_face(tmp_path / "hf")
    write_safetensors(tmp_path / "hf" / "consolidated.safetensors", {"tok_embeddings.weight": torch.ones(2)})
    assert_computes(tmp_path / "hf", tensors(CONFIG))


@pytest.mark.parametrize(
    ("kind", "key", "field", "value"),
    [
        ("mistral", "sliding_window", "window", 4096),
        ("mistral", "num_key_value_heads", "n_kv_heads", 8),
        ("qwen2", "num_key_value_heads", "n_kv_heads", 32),
        ("qwen3", "num_key_value_heads", "n_kv_heads", 32),
        ("qwen3", "head_dim", "head_dim", 128),
        ("llama", "num_key_value_heads", "n_kv_heads", 64),
    ],
)
def test_a_missing_key_has_the_default_of_the_class_in_transformers(tmp_path, kind, key, field, value):
    """A Llama has as many key/value heads as query heads; the others a number of their own. transformers 5.24."""
    config = {**CONFIG, "model_type": kind, "num_attention_heads": 64, "hidden_size": 256, "head_dim": 4}
    # As many heads, and as wide, as the class has without the key.
    sizes = {"num_key_value_heads": 2, "head_dim": 4, key: value}
    sizes.pop("sliding_window", None)
    weights = tensors({**config, **sizes})
    config = {name: entry for name, entry in {**config, **sizes, "sliding_window": None}.items() if name != key}
    read = open_weights(write_hugging_face(tmp_path / "hf", config, weights))
    assert getattr(config_of(read), field) == value


@pytest.mark.parametrize(
    ("kind", "eos", "block"),
    [("llama", (2,), 2048), ("qwen2", (), 32768), ("mistral", (2,), 131072)],
)
def test_the_end_of_a_text_that_a_config_leaves_out_is_that_of_the_class(tmp_path, kind, eos, block):
    config = {name: value for name, value in CONFIG.items() if name not in ("eos_token_id", "max_position_embeddings")}
    read = open_weights(write_hugging_face(tmp_path / "hf", {**config, "model_type": kind, "sliding_window": None}))
    assert (read.metadata.eos, read.metadata.block) == (eos, block)


def test_a_mistral_of_layers_with_full_attention_has_no_window(tmp_path):
    """transformers takes it for a Ministral: sliding_window is that of sliding layers only."""
    config = {**CONFIG, "model_type": "mistral", "sliding_window": 5, "layer_types": ["full_attention"] * 2}
    weights = tensors(config)
    assert_computes(write_hugging_face(tmp_path / "hf", config, weights), weights)


def test_an_odd_head_is_refused_without_wrong_arithmetic(tmp_path):
    """head_dim of a config.json need not be hidden_size / num_attention_heads."""
    config = {**CONFIG, "head_dim": 7}
    with pytest.raises(CheckpointError, match="head_dim 7 is odd"):
        config_of(open_weights(write_hugging_face(tmp_path / "hf", config)))


LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is {'quant_method': 'gptq'}"),
        ({"layer_types": ["full_attention", "sliding"]}, "layer_types is ['full_attention', 'sliding']"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"per_layer_config": {"0": {"mlp_bias": True}}}, "per_layer_config is {'0'"),
        ({"newRopeKind": False}, "newRopeKind"),
        ({"num_new_experts": 8}, "unknown key num_new_experts (8)"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA_3, "rope_theta": 5.0}}, "something else than rope_theta"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA_3, "rope_theta": "5"}}, "rope_theta is '5'"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA_3}, "original_max_position_embeddings": 64},
            "original_max_position_embeddings is 64",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_changes_the_computation(tmp_path, keys, message):
    with pytest.raises(CheckpointError) as refused:
        open_weights(write_hugging_face(tmp_path / "a", {**CONFIG, **keys}))
    assert message in str(refused.value)


@pytest.mark.parametrize("inside", [{"rope_theta": 10_000.0}, {}], ids=["theta inside", "theta outside"])
def test_a_scaling_with_all_that_it_takes(tmp_path, inside):
    """The length may stand outside too, where transformers looks first."""
    keys = {"rope_scaling": {"rope_type": "llama3", **LLAMA_3, **inside}, "original_max_position_embeddings": 32}
    read = open_weights(write_hugging_face(tmp_path / "a", {**CONFIG, **keys}))
    assert config_of(read).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    assert config_of(read).rope_theta == 10_000
