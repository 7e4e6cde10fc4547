"""Plans for unedited models of transformers and timm; benchmarks/plans.py has more of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmm.data.images.torchvision_shim import import_torchvision
from mmm_lab.cli.main import main
from mmm_verify import verify
from mmm_verify.propose.code import Axes
from mmm_verify.propose.find import propose
from mmm_verify.propose.models import default_batch, load_model
from mmm_verify.subject import make_subject
from support.clock import PATIENCE

pytestmark = pytest.mark.interop

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = {**LLAMA, "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
OLMO2 = {**LLAMA, "model_type": "olmo2"}
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64,
    "decoder_start_token_id": 0,
}  # fmt: skip
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "pad_token_id": 0}


def found(name):
    model = load_model(name, import_torchvision)
    batch_fn = default_batch(model, 4, 100.0)
    subject = make_subject(model.model_fn, None, batch_fn, model.step_fn, "dp2")
    return propose(subject, name, Axes(("dp",), "tp"), 2)


def written(config, folder):
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


def consumers(proposal):
    return [group.consumers[0] for group in proposal.tensor.groups]


def test_a_llama_from_its_config(tmp_path, capsys):
    """From the command line, proven on both axes."""
    assert main(["verify", written(LLAMA, tmp_path), "--mesh", "dp2,tp2", "--write", str(tmp_path / "plan.py")]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.self_attn: q_proj, k_proj, v_proj → o_proj (2 times)" in out
    assert "same: dp2·tp2" in out


@pytest.mark.parametrize(
    ("config", "group", "sections", "fixes"),
    [
        (GPT2, "transformer.h.0.attn.c_proj", [((32, 2),) * 3], ["split_size"]),
        (OPT, "model.decoder.layers.1.self_attn.out_proj", [((32, 2),)] * 3, ["num_heads"]),
        (BLOOM, "transformer.h.0.mlp.dense_4h_to_h", [((128, 2),)], []),
    ],
    ids=["gpt2", "opt", "bloom"],
)
def test_groups(config, group, sections, fixes, tmp_path):
    proposal = found(written(config, tmp_path))
    (one,) = [one for one in proposal.tensor.groups if one.consumers == [group]]
    assert list(one.producers.values()) == sections
    assert [name for _, name in one.fixes] == fixes


@pytest.mark.parametrize(
    ("config", "says"),
    [(BLOOM, "alibi.baddbmm("), (T5, "and others take it")],
    ids=["bloom", "t5"],
)
def test_refusals(config, says, tmp_path):
    proposal = found(written(config, tmp_path))
    assert any(says in group.refused for group in proposal.tensor.refused), str(proposal)
    # the MLPs
    assert len(proposal.tensor.groups) >= 2


def test_norms_over_all_heads(tmp_path):
    """The norms of olmo2's queries and keys."""
    proposal = found(written(OLMO2, tmp_path))
    assert not proposal.tensor.refused
    attention = proposal.tensor.groups[0]
    assert attention.gathered == ["model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm"]


def test_experts_in_one_parameter_stay_replicated(tmp_path):
    proposal = found(written({**LLAMA, "model_type": "mixtral", "num_local_experts": 4}, tmp_path))
    assert consumers(proposal) == ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    assert "model.layers.*.mlp.experts.down_proj" in proposal.tensor.replicated


def test_timm():
    """By the name of its function."""
    # Timm imports it: next to a torch of another build it would fail.
    import_torchvision("transforms")
    proposal = found("timm.models:vit_tiny_patch16_224")
    assert consumers(proposal) == [f"blocks.{index}.mlp.fc2" for index in range(12)]
    # 3 heads do not go to 2 ranks
    assert proposal.tensor.refused[0].refused.startswith("blocks.0.attn")
    assert len(proposal.units.blocks) == 12


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "transformers refuses it"),
        ({}, "transformers refuses it"),
        ({**LLAMA, "hidden_size": "wide"}, "transformers refuses it"),
        ({**LLAMA, "architectures": ["T5ForConditionalGeneration"]}, "the model's function raises"),
    ],
)
def test_configs_that_cannot_be_used(config, says, tmp_path, capsys):
    assert main(["verify", written(config, tmp_path)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(lines) == 1
    assert says in lines[0]


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": 8, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
# The grouped products that experts use by default have no float64.
EXPERTS = {
    "experts_implementation": "eager", "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "first_k_dense_replace": 0,
}  # fmt: skip
# Families of transformers without experts.
DENSE_MODELS = ["llama", "qwen3", "gemma3_text", "phi3", "olmo2", "cohere"]
# Families with experts.
MODELS_WITH_EXPERTS = ["gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "qwen2_moe"]


def make_batch():
    """Samples with different counts of labels."""
    tokens = torch.randint(3, 64, (4, 10))
    labels = tokens.clone()
    labels[0, :6] = labels[2, :2] = -100
    return {"input_ids": tokens, "labels": labels}


def model_of(transformers, name):
    sizes = SIZES | (EXPERTS if name in MODELS_WITH_EXPERTS else {})

    def make_model():
        config = transformers.AutoConfig.for_model(name, **sizes)
        return transformers.AutoModelForCausalLM.from_config(config)

    return make_model


def shard(model, mesh):
    """With the plan that the model's class has."""
    from transformers.distributed import DistributedConfig

    config, _, meshes = model.prepare_distribute_model(DistributedConfig(tp_size=mesh["tp"].size()))
    return model.maybe_distribute_model(model, config, meshes)


def shard_without_a_sum(model, mesh):
    """What the first layer's MLP returns is one rank's part."""
    model = shard(model, mesh)
    projection = model.model.layers[0].mlp.down_proj
    unchanged = projection.forward
    projection.forward = lambda x: unchanged(x) - unchanged(x).detach() / 2
    return model


@pytest.mark.parametrize("name", [*DENSE_MODELS, *MODELS_WITH_EXPERTS])
def test_right(transformers, name):
    verdict = verify(model_of(transformers, name), shard, make_batch, mesh="tp2")
    assert verdict.same, f"{verdict}\n{verdict.details}"


def test_wrong(transformers):
    verdict = verify(model_of(transformers, "llama"), shard_without_a_sum, make_batch, mesh="tp2")
    assert verdict.result == "not the same", f"{verdict}\n{verdict.details}"


def test_the_benchmark_of_these_starts(tmp_path):
    results = tmp_path / "plans.json"
    script = Path(__file__).parents[2] / "benchmarks/plans.py"
    subprocess.run([sys.executable, script, "--json", results, "--only", "t5"], check=True, timeout=PATIENCE)
    (row,) = map(json.loads, results.read_text("utf-8").splitlines())
    assert "problem" not in row, row
