"""How much of a model each rank will have at least: parameters, gradients, optimizer state. By arithmetic alone.

::

    of P parameters, k elements of state for each     parameters   gradients   optimizer state
      ddp                                              P            P           k P
      zero1                                            P            P           k P / dp
      zero2                                            P            P / dp      k P / dp
      fsdp, zero3, hsdp                                each / (dp_shard · cp)

P: of the stages of a pipeline rank, over tp. A lower bound: parameters that tp replicates, padding where ranks do not
divide a tensor, activations and buffers come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from mmm.models.weights import parameter_count
from mmm.parallel.data.apply import UNSHARDED
from mmm.parallel.mesh import Layout
from mmm.parallel.pipeline.schedules import stages_of
from mmm.parallel.pipeline.stages import Part

STATE = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True)
class Footprint:
    """What the ranks of a run have in memory.

    Attributes:
        parameters: unsharded, of the ranks of each pp coordinate.
        data_parallel, offload: of `mmm.parallel.Techniques`. state: elements that the optimizer has for a parameter.
    """

    parameters: tuple[int, ...]
    data_parallel: str = "fsdp"
    state: int = 2
    offload: bool = False

    def elements(self, layout: Layout) -> list[int]:
        """Of parameters, gradients and optimizer state together, on a rank of each pp coordinate, at least."""
        parameters, gradients, state = 1.0, 1.0, float(self.state)
        if self.data_parallel in UNSHARDED:
            state /= layout.dp if self.data_parallel != "ddp" else 1
            gradients /= layout.dp if self.data_parallel == "zero2" else 1
        else:
            parameters, gradients, state = (n / (layout.dp_shard * layout.cp) for n in (parameters, gradients, state))
        return [int(count * (parameters + gradients + state) / layout.tp) for count in self.parameters]


def stage_parameters(
    model: nn.Module, parts: Sequence[Part], stages: Sequence[range], pp: int, schedule: str
) -> tuple[int, ...]:
    """Parameters of the stages of each pp coordinate; of the full model where there are none.

    Args:
        model: on the meta device. parts, stages: of `mmm.parallel.pipeline.stages`.
    """
    if not stages:
        return (parameter_count(model),)
    counts = [parameter_count([model.get_submodule(name) for i in stage for name in parts[i]]) for stage in stages]
    return tuple(sum(counts[number] for number in stages_of(at, pp, schedule, len(stages) // pp)) for at in range(pp))
