"""Where no weights can be read: what is there instead, and what to do."""

from __future__ import annotations

from pathlib import Path

from mmm.errors import CheckpointError
from mmm.outside import printable, read_json

ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.pth", "*.pt")
MOST_SHOWN = 5  # names


def no_such_folder(path: Path) -> str:
    """Of a path that is not there: it may be a model's name on the hub."""
    missing = f"{path}: No such file or directory"
    if path.is_absolute() or len(path.parts) > 2 or ".." in path.parts:
        return missing
    return (
        f"{missing}. If that is a model's name on the Hugging Face hub: nothing is downloaded: give a folder; "
        f"`hf download {path} --local-dir FOLDER` makes one"
    )


def is_adapter(path: Path) -> bool:
    """Whether a folder has a small addition to a model (LoRA), and not the model."""
    return (path / ADAPTER).exists() and not any(path.glob("model*.safetensors"))


def what_to_give(path: Path) -> str:
    """Of a folder without weights that can be read."""
    snapshots = sorted(path.glob("snapshots/*/config.json")) or sorted(path.glob("models--*/snapshots/*/config.json"))
    if snapshots:
        return f"{path} is the top of the Hugging Face hub's cache: give one of its snapshots, as {snapshots[0].parent}"
    if is_adapter(path):
        base = printable(str(read_json(path / ADAPTER, CheckpointError).get("base_model_name_or_path")))
        return (
            f"{path} has an adapter of the model {base}, which is no model by itself: merge the two with peft's "
            f"merge_and_unload(), and give the folder that save_pretrained() then writes"
        )
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles and (path / "config.json").exists():
        return (
            f"{path} has its weights in {printable(pickles[0])}, a pickle, which may run code and is not read: "
            f"AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained(FOLDER) of transformers writes "
            f"safetensors"
        )
    names = sorted(file.name for file in path.iterdir())
    more = ", …" if len(names) > MOST_SHOWN else ""
    listed = ", ".join(printable(name) for name in names[:MOST_SHOWN]) or "nothing"
    return (
        f"{path}: no weights are there; give a checkpoint or a run's folder (where --checkpoint_every leaves them; "
        f"model.pt is for plain PyTorch), or a folder with config.json and *.safetensors. It has: {listed}{more}"
    )


def prefix_problem(names: list[str], wanted: str) -> str:
    """Why a tensor is not there under its name, where it has another in front of it; else empty."""
    for name in names:
        if name.endswith("." + wanted):
            return (
                f", but {printable(name)}: save the model without what is in front (of torch.compile that is "
                "model._orig_mod, of peft what merge_and_unload() gives), or rename the tensors"
            )
    return ""
