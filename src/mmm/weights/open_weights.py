"""The one function that knows every kind of weights on disk (`mmm.weights.weights`)."""

from __future__ import annotations

from pathlib import Path

from mmm.checkpoint.manifest import MANIFEST, steps_of
from mmm.errors import CheckpointError
from mmm.weights.no_weights import is_adapter, what_to_give
from mmm.weights.weights import Weights


def open_weights(path: Path) -> Weights:
    """Open the weights at a path: a folder of safetensors and config.json, a checkpoint or a run's folder.

    Raises:
        CheckpointError: there are no weights, or they are of another kind of model.
    """
    # Here: each format imports a part of torch that the others do not need.
    from mmm.weights.hugging_face import HuggingFace
    from mmm.weights.own import OwnWeights

    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and weights are in a folder: one with config.json and *.safetensors, a checkpoint or a "
            "run's folder (docs/fine-tune.md says how transformers makes one from a GGUF file)"
        )
    # A checkpoint, the newest one in a folder of checkpoints, or the newest one of a run.
    in_folder = steps_of(path)[:1]
    in_run = steps_of(path / "checkpoints")[:1]
    for folder in (path, *in_folder, *in_run):
        if (folder / MANIFEST).exists():
            return OwnWeights(folder)
    has_config = (path / "config.json").exists()
    if has_config and any(path.glob("*.safetensors")) and not is_adapter(path):
        return HuggingFace(path)
    raise CheckpointError(what_to_give(path))
