"""What some PyTorch cannot do of what mmm does: one table.

It is read by the checks before the ranks meet, by ``mmm doctor`` and ``mmm plan``; docs/install.md shows it. A row asks
PyTorch itself, not its version: a site's 2.10.0a0 is older than 2.10 for pip and for PyTorch. What only has another
name in another PyTorch is no fault: the function next to the name knows both. A row goes when the oldest PyTorch that
mmm takes, `mmm.runtime.device.OLDEST_TORCH`, can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
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

    choices: frozenset[str]
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
    from torch.distributed.pipelining import schedules

    return hasattr(schedules, "ScheduleDualPipeV")


def _exact_works() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_custom_reduce_scatter")


def _few_microbatches_work() -> bool:
    from torch.distributed.pipelining import schedules

    # A schedule's constructor reads no more of a stage than this.
    stage = SimpleNamespace(num_stages=2, has_backward=True)
    try:
        schedules.ScheduleGPipe(stage, 1)  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def _second_derivatives_work() -> bool:
    import torch
    from torch.torch_version import TorchVersion

    # What was wrong has no name to ask for.
    return TorchVersion(torch.__version__) >= "2.13"


def _complex_sums_work() -> bool:
    # Gloo has no name to ask for: 2.9 brought both.
    return _dual_pipe_works()


FEW = "fewer micro-batches than stages"
COMPLEX = "complex parameters on CPUs"
FAULTS = (
    Fault(
        frozenset({"ZBVZeroBubble"}),
        "2.8, 2.9",
        _zbv_works,
        "a rank that has two stages in a row sends to itself",
        "use InterleavedZeroBubble or 1F1B",
    ),
    Fault(
        frozenset({"DualPipeV"}),
        "2.8",
        _dual_pipe_works,
        "there is no such schedule",
        "use InterleavedZeroBubble or 1F1B",
    ),
    Fault(
        frozenset({"GPipe", FEW}),
        "2.8, 2.9, 2.10",
        _few_microbatches_work,
        "the schedule refuses them",
        "use a micro-batch for each stage",
    ),
    Fault(
        frozenset({"exact"}),
        "2.8",
        _exact_works,
        "FSDP takes no other sum of gradients",
        "leave it out",
    ),
    Fault(
        frozenset({COMPLEX, "fsdp"}),
        "2.8",
        _complex_sums_work,
        "gloo sums no complex numbers",
        "use zero1, or a GPU",
    ),
    Fault(
        frozenset({"create_graph=True", "tp"}),
        "2.8, 2.9, 2.10, 2.11, 2.12",
        _second_derivatives_work,
        "a part of the graph is lost, and second derivatives are wrong",
        "use tp 1",
    ),
)


def met(choices: Collection[str]) -> list[Fault]:
    """Return the faults of this PyTorch that these choices meet."""
    return [fault for fault in FAULTS if fault.choices.issubset(choices) and not fault.works()]
