"""Explains why no weights can be read from a path, and what to do instead."""

from __future__ import annotations

from pathlib import Path

from mmm.errors import CheckpointError
from mmm.outside import printable, read_json

ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.pth", "*.pt")
# The most file names that a message lists.
MOST_SHOWN = 5


def no_such_folder(path: Path) -> str:
    """The message for a path that does not exist. It may be a model's name on the hub."""
    missing = f"{path}: No such file or directory"
    # A model's name is like "gpt2" or "Qwen/Qwen2.5-0.5B".
    if path.is_absolute() or len(path.parts) > 2 or ".." in path.parts:
        return missing
    return (
        f"{missing}. If that is a model's name on the Hugging Face hub: nothing is downloaded: give a folder; "
        f"`hf download {path} --local-dir FOLDER` makes one"
    )


def is_adapter(path: Path) -> bool:
    """Whether a folder holds only an adapter (LoRA), a small addition to a model."""
    return (path / ADAPTER).exists() and not any(path.glob("model*.safetensors"))


def what_to_give(path: Path) -> str:
    """The message for a folder without weights that can be read."""
    snapshots = sorted(path.glob("snapshots/*/config.json"))
    if not snapshots:
        snapshots = sorted(path.glob("models--*/snapshots/*/config.json"))
    if snapshots:
        return f"{path} is the top of the Hugging Face hub's cache: give one of its snapshots, as {snapshots[0].parent}"
    if is_adapter(path):
        config = read_json(path / ADAPTER, CheckpointError)
        base = printable(str(config.get("base_model_name_or_path")))
        return (
            f"{path} has an adapter of the model {base}, which is not a model by itself: merge the two with peft's "
            f"merge_and_unload(), and give the folder that save_pretrained() then writes"
        )
    pickles: list[str] = []
    for pattern in PICKLES:
        pickles += [file.name for file in path.glob(pattern)]
    if pickles and (path / "config.json").exists():
        return (
            f"{path} has its weights in {printable(min(pickles))}, a pickle, which may run code and is not read: "
            f"AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained(FOLDER) of transformers writes "
            f"safetensors"
        )
    names = sorted(file.name for file in path.iterdir())
    listed = ", ".join(map(printable, names[:MOST_SHOWN])) or "nothing"
    if len(names) > MOST_SHOWN:
        listed += ", …"
    return (
        f"{path}: no weights are there; give a checkpoint or a run's folder (where --checkpoint_every leaves them; "
        f"model.pt is for plain PyTorch), or a folder with config.json and *.safetensors. It has: {listed}"
    )


def prefix_problem(names: list[str], wanted: str) -> str:
    """The end of a message about a missing tensor, if a tensor has its name with a prefix; empty otherwise.

    Args:
        names: the tensors' names in the files.
        wanted: the name that is missing.
    """
    for name in names:
        if name.endswith("." + wanted):
            return (
                f", but {printable(name)}: save the model without the prefix (torch.compile: save model._orig_mod; "
                "peft: save what merge_and_unload() returns), or rename the tensors"
            )
    return ""
