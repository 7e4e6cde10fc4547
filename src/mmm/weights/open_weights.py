"""The one function that knows every kind of weights on disk (`mmm.weights.weights`)."""

from __future__ import annotations

from pathlib import Path

from mmm.checkpoint.manifest import MANIFEST, steps_of
from mmm.errors import CheckpointError
from mmm.weights.no_weights import is_adapter, no_such_folder, what_to_give
from mmm.weights.weights import Weights


def open_weights(path: Path) -> Weights:
    """The weights at a path: a folder of safetensors and config.json, a checkpoint or a run's folder.

    Raises:
        CheckpointError: there are none, or they are of another kind of model.
    """
    # Here: a format takes a part of torch to import that the others do not need.
    from mmm.weights.hugging_face import HuggingFace
    from mmm.weights.own import OwnWeights

    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and weights are in a folder: one with config.json and *.safetensors, a checkpoint or a "
            "run's folder (docs/fine-tune.md says how transformers makes one from a GGUF file)"
        )
    for folder in (path, *steps_of(path)[:1], *steps_of(path / "checkpoints")[:1]):
        if (folder / MANIFEST).exists():
            return OwnWeights(folder)
    if not path.exists():
        raise CheckpointError(no_such_folder(path))
    if (path / "config.json").exists() and any(path.glob("*.safetensors")) and not is_adapter(path):
        return HuggingFace(path)
    raise CheckpointError(what_to_give(path))
