"""Explains why no weights can be read from a path, and what to do instead."""

from __future__ import annotations

from pathlib import Path

from mmm.errors import CheckpointError
from mmm.outside import printable, read_json

ADAPTER = "adapter_config.json"
# Files of pickles, which may run code and are not read.
PICKLES = (".bin", ".pth", ".pt")
# The most file names that a message lists.
MOST_SHOWN = 5


def is_adapter(path: Path) -> bool:
    """Whether a folder holds only an adapter (LoRA), a small addition to a model."""
    return (path / ADAPTER).exists() and not any(path.glob("model*.safetensors"))


def what_to_give(path: Path) -> str:
    """The message for a path without weights that can be read."""
    if not path.exists():
        return (
            f"{path}: No such file or directory. Nothing is downloaded: of a model on the Hugging Face hub, "
            f"`hf download NAME --local-dir FOLDER` makes a folder"
        )
    if is_adapter(path):
        config = read_json(path / ADAPTER, CheckpointError)
        base = printable(str(config.get("base_model_name_or_path")))
        return (
            f"{path} has an adapter of the model {base}, which is not a model by itself: merge the two with peft's "
            f"merge_and_unload(), and give the folder that save_pretrained() then writes"
        )
    names = sorted(file.name for file in path.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and "config.json" in names:
        return (
            f"{path} has its weights in {printable(pickles[0])}, a pickle, which may run code and is not read: "
            f"AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained(FOLDER) of transformers writes "
            f"safetensors"
        )
    listed = ", ".join(map(printable, names[:MOST_SHOWN])) or "nothing"
    if len(names) > MOST_SHOWN:
        listed += ", …"
    return (
        f"{path}: no weights are there; give a checkpoint or a run's folder (where --checkpoint_every leaves them; "
        f"model.pt is for plain PyTorch), or a folder with config.json and *.safetensors, such as a snapshot in the "
        f"hub's cache. It has: {listed}"
    )
