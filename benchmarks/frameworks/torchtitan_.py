"""torchtitan: its `parallelize_llama`, with two layers of its debug model."""

from typing import Any

import torch
import torch.nn.functional as F
import torchtitan.distributed.parallel_dims
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry, parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

N_LAYERS = 2
VOCABULARY = 2048
# The default, spmd_types, needs torchtitan's own training loop around it.
BACKEND = "partial_dtensor"

if not torch.cuda.is_available():
    # Without an accelerator, torchtitan would make meshes of CUDA devices.
    torchtitan.distributed.parallel_dims.device_type = "cpu"


def make_model() -> nn.Module:
    config = model_registry("debugmodel").model
    config.layers = config.layers[:N_LAYERS]
    for layer in config.layers:
        # The default, FlexAttention, has no backward on a CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=True)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    # (samples, tokens)
    return torch.randint(VOCABULARY, (4, 16)), torch.randint(VOCABULARY, (4, 16))


def dp_size(mesh: DeviceMesh) -> int:
    if "dp" not in (mesh.mesh_dim_names or ()):
        return 1
    return mesh["dp"].size()


def parallelize(model: Any, mesh: DeviceMesh) -> nn.Module:
    dp = dp_size(mesh)
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=dp, tensor_parallel_degree=mesh.size() // dp, spmd_backend=BACKEND
    )
    set_spmd_backend(BACKEND)
    parallel_dims = ParallelDims.from_config(parallelism, mesh.size())
    parallel_dims.build_mesh()
    program = parallelize_llama(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in program.modules():
        if isinstance(module, FSDPModule):
            # torchtitan's FSDP sums by an operator that gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
    return program


def _loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return cross_entropy_loss(model(tokens, positions=positions), targets, global_vocab_size=VOCABULARY)


def _one_device(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return F.cross_entropy(model(tokens, positions=positions).flatten(0, 1), targets.flatten())


def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        return _one_device(model, batch)
    # torchtitan sums gradients over dp: each rank divides its loss by the number of tokens of all ranks.
    return _loss_sum(model, batch) / (batch[1].numel() * dp_size(mesh))


def local_tokens(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    """A planted mistake: each rank divides its loss by its own number of tokens."""
    if mesh is None:
        return _one_device(model, batch)
    return _loss_sum(model, batch) / batch[1].numel()
