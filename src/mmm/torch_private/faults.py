"""What some PyTorch cannot do of what mmm does: one table.

It is read by the checks before the ranks meet, by ``mmm doctor`` and ``mmm plan``; docs/install.md shows it. A row asks
PyTorch itself where it can, not its version: a site's 2.10.0a0 is older than 2.10 for pip and for PyTorch. What only
has another name in another PyTorch is no fault: the function next to the name knows both. A row goes when the oldest
PyTorch that mmm takes, `mmm.runtime.device.OLDEST_TORCH`, can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple


class Fault(NamedTuple):
    """What a PyTorch cannot do.

    Attributes:
        choices: what meets it if all of them are chosen: values of flags, and axes of more than one rank.
        versions: the releases in which it was seen.
        works: whether this PyTorch can do it. It imports what it asks.
        reason: what happens.
        instead: what to take.
    """

    choices: set[str]
    versions: str
    works: Callable[[], bool]
    reason: str
    instead: str

    @property
    def what(self) -> str:
        return " with ".join(sorted(self.choices))

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}; {self.instead}"


def _zbv_works() -> bool:
    from torch.distributed.pipelining import schedules

    return issubclass(schedules.ScheduleZBVZeroBubble, schedules._PipelineScheduleRuntime)


def _dual_pipe_works() -> bool:
    # What 2.9 also mended, in gloo and in `parallelize_module`, has no name to ask for.
    from torch.distributed.pipelining import schedules

    return hasattr(schedules, "ScheduleDualPipeV")


def _exact_works() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_custom_reduce_scatter")


def _is_2_13() -> bool:
    import torch

    # What was wrong has no name to ask for. This compares numbers, not letters.
    return torch.__version__ >= "2.13"


def _is_2_11() -> bool:
    # What 2.11 mended of GPipe and of FSDP has no name to ask for; with it, styles kept what is frozen.
    import inspect

    from torch.distributed.tensor.parallel import ColwiseParallel

    return "requires_grad" in inspect.getsource(ColwiseParallel)


def _is_2_12() -> bool:
    # What 2.12 mended of tensor parallelism has no name to ask for; with it, FSDP made no gradient for what is frozen.
    import inspect

    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return "requires_grad=param.requires_grad" in inspect.getsource(FSDPParam)


FEW = "fewer micro-batches than stages"
DEEP = "pp above 2"
SPLIT_CHUNKS = "a schedule that splits backward with loss_chunks"
COMPLEX = "complex parameters on CPUs"
INTEGERS = "parameters of integers"
MATRIX = "a Linear or Conv1D"
GROUPED = "key/value heads that query heads share, on CPUs"
PIECES = "FSDP units inside a module that is checkpointed piece by piece"
DOTTED = "parallelize_module with a name of several parts"
FAULTS = (
    Fault(
        {"ZBVZeroBubble"},
        "2.8, 2.9",
        _zbv_works,
        "a rank that has two stages in a row sends to itself",
        "use InterleavedZeroBubble or 1F1B",
    ),
    Fault(
        {"DualPipeV"},
        "2.8",
        _dual_pipe_works,
        "there is no such schedule",
        "use InterleavedZeroBubble or 1F1B",
    ),
    Fault(
        {"GPipe", FEW},
        "2.8, 2.9, 2.10",
        _is_2_11,
        "the schedule refuses them",
        "use a micro-batch for each stage",
    ),
    Fault(
        {"LoopedBFS", DEEP},
        "2.8, 2.9",
        _zbv_works,
        "its ranks wait for each other forever",
        "use Interleaved1F1B",
    ),
    Fault(
        {SPLIT_CHUNKS},
        "2.8, 2.9, 2.10, 2.11, 2.12",
        _is_2_13,
        "the separate backward of the weights fails at a custom autograd.Function",
        "use 1F1B, or loss_chunks 1",
    ),
    Fault(
        {"exact"},
        "2.8",
        _exact_works,
        "FSDP's sum of gradients cannot be replaced",
        "leave it out",
    ),
    Fault(
        {COMPLEX, "fsdp"},
        "2.8",
        _dual_pipe_works,
        "gloo sums no complex numbers",
        "use zero1, or a GPU",
    ),
    Fault(
        {"create_graph=True", "tp"},
        "2.8, 2.9, 2.10, 2.11, 2.12",
        _is_2_13,
        "a part of the graph is lost, and second derivatives are wrong",
        "use tp 1",
    ),
    Fault(
        {INTEGERS},
        "2.8, 2.9, 2.10, 2.11",
        _is_2_12,
        "FSDP and tensor parallelism ask for their gradients",
        "keep them in a buffer",
    ),
    Fault(
        {"SequenceParallel", MATRIX},
        "2.8, 2.9, 2.10, 2.11",
        _is_2_12,
        "it flattens a batch of several samples, but the sequence is sharded",
        "name it Replicated()",
    ),
    Fault(
        {GROUPED},
        "2.8",
        _dual_pipe_works,
        "attention keeps the scores of all pairs of tokens: more memory than is predicted",
        "give each query head its own, or use a GPU",
    ),
    Fault(
        {PIECES},
        "2.8, 2.9, 2.10",
        _is_2_11,
        "backward recomputes the second piece without the weights, which were freed after the first",
        "make the module itself the unit",
    ),
    # From here on: functions of PyTorch that are silently wrong, besides those that `mmm_verify.audit` knows.
    Fault(
        {"fully_shard's mean in float32 or bfloat16 on CPUs"},
        "2.8",
        _dual_pipe_works,
        "gradients are summed: they are dp times too large",
        "set_gradient_divide_factor(1.0), and divide the loss by the global count",
    ),
    Fault(
        {DOTTED},
        "2.8",
        _dual_pipe_works,
        "the style also goes to a child of the model itself that has the last part as its name",
        "call it for each part of the model",
    ),
)


def met(choices: Collection[str]) -> list[Fault]:
    """Return the faults of this PyTorch that these choices meet."""
    return [fault for fault in FAULTS if fault.choices.issubset(choices) and not fault.works()]
