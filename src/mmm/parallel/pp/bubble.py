"""The bubble of a pipeline as a formula, for stages that all take the same time.

With p ranks, V stages on each, and m micro-batches::

    schedule                    bubble                   holds if
    GPipe, 1F1B                 (p-1) / (m + p-1)        always
    Interleaved1F1B, LoopedBFS  (p-1) / (m V + p-1)      m >= p
    InterleavedZeroBubble,      (p-1) / (3 m V + p-1)    F, I and W take the same time, and m >= p
    DualPipeV
    ZBVZeroBubble               (p-1) / (3 m V + p-1)    F, I and W take the same time, and m >= 3 p / 2

F is the forward of a stage; I and W are the two halves of its backward, the gradients of the input and of the weights.
The zero-bubble schedules still wait for p - 1 forwards, while the pipeline fills. Their papers leave these out.

Sources: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021,
section 2.2 (the first two); Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2: ZB-H1 waits (p-1) (F+I-W);
Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (ZB-V); DeepSeek-AI, "DeepSeek-V3", 2024 (DualPipe).
"""


def bubble_formula(schedule: str, pp: int, microbatches: int, stages_per_rank: int = 1) -> float | None:
    """The fraction of a step that ranks wait, as the mean over ranks; None where there is no closed formula.

    Args:
        schedule: a key of `mmm.parallel.pp.schedules.SCHEDULES`.
    """
    # Forwards of each rank in a step.
    forwards = microbatches * stages_per_rank
    if schedule in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"):
        if microbatches < pp and stages_per_rank > 1:
            # A rank finishes all micro-batches of one stage before the first of them reaches its next stage.
            return None
        return (pp - 1) / (forwards + pp - 1)
    # The fewest micro-batches for which the formula holds.
    least = {"InterleavedZeroBubble": pp, "ZBVZeroBubble": 3 * pp // 2, "DualPipeV": pp}
    if schedule not in least or microbatches < least[schedule]:
        return None
    # F, I and W are three units of work, so that a forward of the fill counts a third of a micro-batch.
    return (pp - 1) / (3 * forwards + pp - 1)
