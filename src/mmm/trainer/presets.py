"""What a preset of the language-model trainer sets besides the model's sizes: defaults of flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DECAY: dict[str, Any] = {"weight_decay": 0.1, "decayed": "matrices"}
# Sequence and batch of the shakespeare presets, and rates of gpt2: nanoGPT's configurations of the same names.
TRAINING: dict[str, dict[str, Any]] = {
    "shakespeare": {
        **_DECAY,
        "dataset": "shakespeare",
        "seq_length": 1024,
        "global_batch_size": 64,
        "lr": 1e-3,
        "warmup": 100,
        "max_iters": 2000,
        "eval_every": 250,
        "checkpoint_every": 2000,  # a gigabyte, at the end: the weights that `mmm sample` reads
        "log_every": 10,
    },
    "shakespeare-cpu": {
        **_DECAY,
        "dataset": "shakespeare",
        "seq_length": 64,
        "global_batch_size": 12,
        "lr": 1e-3,
        "warmup": 100,
        "lr_schedule": "wsd",  # a validation loss lower by 0.02 than with cosine, after as many steps
        "decay": 1400,
        "max_iters": 2000,
        "eval_every": 500,
        "checkpoint_every": 1000,
        "eval_batches": 145,  # all of the text's last tenth
        "log_every": 10,
    },
    "gpt2": {**_DECAY, "seq_length": 1024, "lr": 6e-4, "warmup": 100},
    "llama-1b": {**_DECAY, "seq_length": 2048, "lr": 3e-4, "warmup": 100},
}
_NANOGPT: dict[str, Any] = {**_DECAY, "log_every": 10, "eval_train": True}
# Of --model gpt: nanoGPT's config/train_gpt2.py, config/train_shakespeare_char.py, and what its README changes of it
# for a CPU.
GPT_TRAINING: dict[str, dict[str, Any]] = {
    "gpt2": {
        **_NANOGPT,
        "seq_length": 1024,
        "global_batch_size": 480,
        "lr": 6e-4,
        "min_lr": 6e-5,
        "betas": (0.9, 0.95),
        "warmup": 2000,
        "max_iters": 600_000,
        "eval_every": 1000,
        "eval_batches": 5,  # of 480: as many samples as its 200 of 12
    },
    "shakespeare": {
        **_NANOGPT,
        "dataset": "shakespeare",
        "tokenizer": Path("chars"),
        "seq_length": 256,
        "global_batch_size": 64,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "betas": (0.9, 0.99),
        "warmup": 100,
        "max_iters": 5000,
        "eval_every": 250,
        "eval_batches": 200,
        "checkpoint_every": 5000,
    },
    "shakespeare-cpu": {
        **_NANOGPT,
        "dataset": "shakespeare",
        "tokenizer": Path("chars"),
        "seq_length": 64,
        "global_batch_size": 12,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "betas": (0.9, 0.99),
        "warmup": 100,
        "max_iters": 2000,
        "eval_every": 250,
        "eval_batches": 20,
        "checkpoint_every": 2000,
    },
}


# A preset's flag that another flag contradicts: it is left out where that one is given.
CONTRADICTED = (
    ("text", "dataset"),
    ("text", "tokenizer"),
    ("batch_size", "global_batch_size"),
    ("lr_schedule", "decay"),
    ("epochs", "max_iters"),
)


def preset_defaults(given: Mapping[str, str]) -> dict[str, Any]:
    """Defaults of flags where such a preset is asked for; empty where none is.

    What contradicts a flag that is given is left out: a data set beside ``--text``, a global batch beside the batch of
    each data-parallel coordinate, the length of a decay beside ``--lr_schedule``, the steps beside ``--epochs``.

    Args:
        given: flags by name, their values as text.
    """
    presets = GPT_TRAINING if given.get("model") == "gpt" else TRAINING
    preset = given.get("preset")
    if preset not in presets:
        return {}
    defaults = {"preset": preset, **presets[preset]}
    for flag, name in CONTRADICTED:
        if flag in given:
            defaults.pop(name, None)
    if given.get("optimizer") == "sgd":
        for name in ("betas", *_DECAY):
            defaults.pop(name, None)
    return defaults
