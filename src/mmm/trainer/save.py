"""One unsharded state dict, which plain PyTorch loads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from mmm.models.weights import canonical_name
from mmm.trainer.run import Run


def save_model(run: Run, model: nn.Module) -> Path | None:
    """Write ``model.pt`` into the run's folder: whole tensors under their canonical names. A collective.

    Returns:
        The file, on rank 0; None elsewhere.
    """
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if run.outdir is None:
        return None
    path = run.outdir / "model.pt"
    part = path.with_suffix(".part")
    torch.save({canonical_name(name): tensor for name, tensor in state.items()}, part)
    part.replace(path)
    run.log.info("model: %s", path, stacklevel=2)
    return path
