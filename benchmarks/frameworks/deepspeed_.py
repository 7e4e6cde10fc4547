"""DeepSpeed: its engine with ZeRO 1, 2 and 3, and its automatic tensor parallelism."""

from typing import Any

import deepspeed
from small import loss_of, make_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

SAMPLES_PER_RANK = 4


class Optimizer:
    """The engine's steps, for verify: an engine is a module, and is not taken for an optimizer."""

    def __init__(self, engine: Any) -> None:
        self.step = engine.step

    def zero_grad(self) -> None:
        """The engine does this itself, after its step."""


def _engine(model: nn.Module, stage: int, **settings: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES_PER_RANK,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)
    return engine, Optimizer(engine)


def ddp(model: nn.Module, mesh: DeviceMesh) -> Any:
    return _engine(model, 0)


def zero1(model: nn.Module, mesh: DeviceMesh) -> Any:
    return _engine(model, 1)


def zero2(model: nn.Module, mesh: DeviceMesh) -> Any:
    return _engine(model, 2)


def zero3(model: nn.Module, mesh: DeviceMesh) -> Any:
    return _engine(model, 3)


def _auto_tp(model: nn.Module, mesh: DeviceMesh, stage: int) -> Any:
    plan = {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*down\.weight$"], "partition_type": "row"},
        ],
    }
    settings = {"autotp_size": mesh["tp"].size(), "partition_config": plan}
    return _engine(model, stage, tensor_parallel=settings)


def auto_tp(model: nn.Module, mesh: DeviceMesh) -> Any:
    return _auto_tp(model, mesh, 0)


def auto_tp_zero1(model: nn.Module, mesh: DeviceMesh) -> Any:
    return _auto_tp(model, mesh, 1)


def step(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        return loss_of(program, batch)
    engine, _ = program
    loss = loss_of(engine, batch)
    engine.backward(loss)
    return loss.detach()


def forgotten_boundary(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    """A planted mistake: the last micro-batch of a step is not said to be the last."""
    if mesh is not None:
        program[0].set_gradient_accumulation_boundary(False)
    return step(program, batch, mesh)
