"""Hugging Face transformers: its tensor-parallel and FSDP plans, and the steps of its `Trainer` under DDP."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from small import make_optimizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.trainer_pt_utils import LabelSmoother

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

SMOOTHING = 0.1


def make_llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def make_tied() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def make_qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))


def make_gemma3() -> nn.Module:
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, pad_token_id=0))


def make_gpt_oss() -> nn.Module:
    config = GptOssConfig(**SIZES, num_local_experts=4, head_dim=8, pad_token_id=0)
    config._experts_implementation = "eager"
    return GptOssForCausalLM(config)


def make_moe() -> nn.Module:
    config = Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1,
    )  # fmt: skip
    # The default way of calling experts has no float64.
    config._experts_implementation = "eager"
    return Qwen3MoeForCausalLM(config)


def make_batch() -> dict[str, Tensor]:
    # (samples, tokens)
    tokens = torch.randint(64, (8, 12))
    return {"input_ids": tokens, "labels": tokens}


def make_unequal() -> dict[str, Tensor]:
    """The first half of the samples has fewer labels."""
    batch = make_batch()
    labels = batch["labels"].clone()
    labels[:4, 3:] = -100
    return {**batch, "labels": labels}


def _distributed(model: Any, **sizes: int) -> nn.Module:
    """Load the model's weights from a folder, as users do, in parallel."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    # Only rank 0 writes.
    model.save_pretrained(folders[0])
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        folders[0],
        dtype=model.dtype,
        experts_implementation="eager",
        distributed_config=DistributedConfig(**sizes),
    )


def tp(model: nn.Module, mesh: Any) -> nn.Module:
    return _distributed(model, tp_size=mesh.size())


def norm_without_sum(model: nn.Module, mesh: Any) -> nn.Module:
    """A planted mistake: a norm of each head, whose gradient is not added up over the ranks, which have other heads."""
    return _distributed(model, tp_size=mesh.size(), tp_plan={"model.layers.*.self_attn.q_norm": "replicate"})


def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    return _distributed(model, fsdp_size=mesh.size())


def fsdp_tp(model: nn.Module, mesh: Any) -> nn.Module:
    return _distributed(model, fsdp_size=mesh["dp"].size(), tp_size=mesh["tp"].size())


def fsdp_ep(model: nn.Module, mesh: Any) -> nn.Module:
    """Each rank has some of the experts, and a shard of all else."""
    return _distributed(model, fsdp_size=mesh.size(), ep_size=mesh.size())


def _trainer(model: nn.Module, **settings: Any) -> Any:
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[], **settings)
    optimizer = make_optimizer(model.parameters())
    trainer = Trainer(model, args, optimizers=(optimizer, None))
    wrapped, optimizer = trainer.accelerator.prepare(model, optimizer)
    return wrapped, optimizer, trainer


def trainer(model: nn.Module, mesh: Any) -> Any:
    return _trainer(model)


def trainer_with_local_counts(model: nn.Module, mesh: Any) -> Any:
    return _trainer(model, average_tokens_across_devices=False)


def trainer_with_smoothing(model: nn.Module, mesh: Any) -> Any:
    return _trainer(model, label_smoothing_factor=SMOOTHING)


def trainer_step(program: Any, batch: dict[str, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        return program(**batch).loss
    model, _, trainer = program
    samples, count = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
    return trainer.training_step(model, samples[0], count)


def step_by_halves(program: Any, batch: dict[str, Tensor], mesh: Any) -> Tensor:
    """A router's loss is not a mean over samples. Under data parallelism, it is the mean over the ranks' batches."""
    if mesh is not None:
        return program(**batch).loss
    first = {name: tensor.chunk(2)[0] for name, tensor in batch.items()}
    second = {name: tensor.chunk(2)[1] for name, tensor in batch.items()}
    return (program(**first).loss + program(**second).loss) / 2


def trainer_step_by_halves(program: Any, batch: dict[str, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        return step_by_halves(program, batch, None)
    return trainer_step(program, batch, mesh)


def smooth_step(program: Any, batch: dict[str, Tensor], mesh: Any) -> Tensor:
    if mesh is not None:
        return trainer_step(program, dict(batch), mesh)
    output = program(input_ids=batch["input_ids"])
    return LabelSmoother(SMOOTHING)(output, batch["labels"], shift_labels=True)
