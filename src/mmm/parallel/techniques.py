"""What the sizes of a layout leave open: the techniques on it, in one object that is passed whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """How a model is parallelized on a layout.

    Attributes:
        data_parallel: ``ddp``, ``zero1``, ``zero2``, ``fsdp`` (the same as ``zero3``) or ``hsdp``.
        reshard_after_forward: the FSDP units that are freed after forward, and gathered again for backward. ``auto``:
            all but the last, in a pipeline none. ``always``: all. ``never``: none.
        cp_style: of attention over a sharded sequence, where the mesh has cp: ``ring`` or ``ulysses``.
        schedule: of a pipeline. stages_per_rank: None for the fewest that the schedule takes.
        microbatches: of a step. None: with pp what the schedule needs at least, else 1. With pp they have the same
            size; else they differ by one sample at most (gradient accumulation).
        checkpointing: of activations, of the modules that the plan names: ``none``, ``full`` or ``selective``.
        compile: compile what the plan says can be compiled.
        loss_chunks: chunks of the sequence that logits and loss are computed in; the loss is then `loss_of` the model.
        tile: tiles of the sequence that MLPs are computed in.
        offload: keep what the optimizer updates, and its state, in the host's memory.
    """

    data_parallel: str = "fsdp"
    reshard_after_forward: str = "auto"
    cp_style: str = "ring"
    schedule: ScheduleName = "1F1B"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    checkpointing: str = "none"
    compile: bool = False
    loss_chunks: int = 1
    tile: int = 1
    offload: bool = False
