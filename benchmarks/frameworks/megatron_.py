"""megatron-core: its tensor-parallel layers and loss, its DDP, sequence parallelism, and label smoothing."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import TransformerConfig
from small import VOCABULARY, WIDTH, loss_of, make_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

SMOOTHING = 0.1


# Megatron's layers return their output and a bias that is not yet added.
class Column(ColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Row(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class MainGradOptimizer:
    """Steps by `main_grad`, as Megatron's own FP32Optimizer, which needs CUDA."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self.optimizer = make_optimizer(model.parameters())

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad_buffer()


def config_of(model: nn.Module, **settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=2,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        use_cpu_initialization=True,
        params_dtype=next(model.parameters()).dtype,
        **settings,
    )


def loaded(layer: nn.Module, old: nn.Module) -> nn.Module:
    """Fill a layer with this rank's part of the old one's weights."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in layer.named_parameters():
        full = old.get_parameter(name)
        if getattr(parameter, "tensor_model_parallel", False):
            full = full.chunk(size, parameter.partition_dim)[rank]
        parameter.data.copy_(full)
    return layer


def replace_layers(model: Any, config: TransformerConfig, gather_output: bool = False) -> None:
    common: dict[str, Any] = {"config": config, "init_method": nn.init.zeros_}
    embedding = VocabParallelEmbedding(VOCABULARY, WIDTH, reduce_scatter_embeddings=config.sequence_parallel, **common)
    model[0] = loaded(embedding, model[0])
    for block in model[1:3]:
        block.up = loaded(Column(WIDTH, 4 * WIDTH, **common), block.up)
        down = Row(4 * WIDTH, WIDTH, bias=True, input_is_parallel=True, skip_bias_add=False, **common)
        block.down = loaded(down, block.down)
    model[3] = loaded(Column(WIDTH, VOCABULARY, gather_output=gather_output, **common), model[3])


def _ddp(model: nn.Module, config: TransformerConfig, **settings: Any) -> Any:
    model = DistributedDataParallel(config, DistributedDataParallelConfig(**settings), model)
    return model, MainGradOptimizer(model)


def layers_gathered(model: nn.Module, mesh: DeviceMesh) -> None:
    replace_layers(model, config_of(model), gather_output=True)


def ddp(model: nn.Module, mesh: DeviceMesh) -> Any:
    config = config_of(model)
    replace_layers(model, config)
    return _ddp(model, config)


def ddp_overlapped(model: nn.Module, mesh: DeviceMesh) -> Any:
    return _ddp(model, config_of(model), overlap_grad_reduce=True, bucket_size=1000)


def sequence_parallel(model: Any, mesh: DeviceMesh) -> Any:
    program = sequence_parallel_without_marks(model, mesh)
    for block in model[1:3]:
        # Each rank's norm sees a part of the tokens. Megatron's own norms carry this mark.
        for parameter in block.norm.parameters():
            parameter.sequence_parallel = True
    return program


def sequence_parallel_without_marks(model: Any, mesh: DeviceMesh) -> Any:
    """A planted mistake: a norm of one's own without the mark, so its gradients are not summed over tp."""
    config = config_of(model, sequence_parallel=True)
    replace_layers(model, config)
    return _ddp(model, config)


def backward(program: Any, loss: Tensor) -> Tensor:
    """Megatron's training loop after forward: backward, and then what ranks owe each other."""
    loss.backward()
    finalize_model_grads([program[0]])
    return loss.detach()


def ddp_step(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        return loss_of(program, batch)
    tokens, targets = batch
    return backward(program, vocab_parallel_cross_entropy(program[0](tokens), targets).mean())


def overlapped_step(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        return loss_of(program, batch)
    return backward(program, loss_of(program[0], batch))


def sequence_parallel_step(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        return loss_of(program, batch)
    tokens, targets = batch
    # Megatron's embedding takes (samples, tokens), and gives this rank's tokens first: (tokens / tp, samples, width).
    logits = program[0](tokens)
    return backward(program, vocab_parallel_cross_entropy(logits, targets.T.contiguous()).mean())


# The smallest program that shows label smoothing over a rank's own part of the vocabulary.
def make_head() -> nn.Module:
    return nn.Linear(WIDTH, VOCABULARY)


def make_head_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.randint(VOCABULARY, (8,))


def head(model: Any, mesh: DeviceMesh) -> nn.Module:
    return loaded(Column(WIDTH, VOCABULARY, config=config_of(model), init_method=nn.init.zeros_), model)


def head_step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any, smoothing: float = 0.0) -> Tensor:
    x, targets = batch
    if mesh is None:
        # Megatron spreads the smoothing over all tokens but the right one, PyTorch over all of them.
        smoothing *= VOCABULARY / (VOCABULARY - 1)
        return F.cross_entropy(model(x), targets, label_smoothing=smoothing)
    return vocab_parallel_cross_entropy(model(x), targets, smoothing).mean()


def smooth_head_step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    return head_step(model, batch, mesh, SMOOTHING)
