"""Models of transformers under its own tensor parallelism: `mmm verify` accuses none of them."""

import pytest
import torch

from mmm_verify import verify

pytestmark = pytest.mark.interop

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
DENSE_MODELS = ["llama", "qwen3", "gemma3_text", "phi3", "olmo2", "cohere"]
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
    whole = projection.forward
    projection.forward = lambda x: whole(x) - whole(x).detach() / 2
    return model


@pytest.mark.parametrize("name", [*DENSE_MODELS, *MODELS_WITH_EXPERTS])
def test_right(transformers, name):
    verdict = verify(model_of(transformers, name), shard, make_batch, mesh="tp2")
    assert verdict.same, f"{verdict}\n{verdict.details}"


def test_wrong(transformers):
    verdict = verify(model_of(transformers, "llama"), shard_without_a_sum, make_batch, mesh="tp2")
    assert verdict.result == "not the same", f"{verdict}\n{verdict.details}"
