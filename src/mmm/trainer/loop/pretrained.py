"""A run that starts from weights on disk (``--init_from``)."""

from __future__ import annotations

from dataclasses import asdict

from mmm.generate.weights import config_of, load_weights
from mmm.parallel.parallel_model import ParallelModel
from mmm.trainer.run.core import Run
from mmm.trainer.run.resume import ResumableRecord
from mmm.weights.weights import Weights


def start_from(run: Run, model: ParallelModel, weights: Weights | None) -> None:
    """Load the weights that a run starts from, unless it goes on from a checkpoint. A collective."""
    record = run.hook(ResumableRecord)
    if weights is None or (record is not None and record.origin is not None):
        return
    load_weights(run.rank, model, weights)
    for text in (f"weights of {weights.path}", *weights.metadata.notes):
        run.note(text)
    run.describe(init_from={"path": weights.path, "sizes": asdict(config_of(weights))})
