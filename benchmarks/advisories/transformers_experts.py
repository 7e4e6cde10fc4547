"""Expert parallelism of transformers: do the router, and all below it, get every rank's gradients?"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def make_model():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, experts_implementation="eager"))


def make_batch():
    tokens = torch.randint(64, (4, 12))
    return {"input_ids": tokens, "labels": tokens}


def load(model, **settings):
    """As users do: the weights come from a folder."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    config = DistributedConfig(tp_size=dist.get_world_size(), **settings)
    return AutoModelForCausalLM.from_pretrained(
        folder[0], dtype=model.dtype, experts_implementation="grouped_mm", distributed_config=config
    )


def experts(model, mesh):
    try:
        return load(model, ep_size=mesh.size())
    except TypeError:  # before 5.17
        return load(model, enable_expert_parallel=True)


def tensors(model, mesh):
    """The control: each expert is cut in two."""
    return load(model)
