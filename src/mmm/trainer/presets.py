"""What a preset of the language-model trainer sets besides the model's sizes: defaults of flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Weight decay as GPT-3 and nanoGPT have it.
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
        # A gigabyte, at the end: the weights that `mmm sample` reads.
        "checkpoint_every": 2000,
        "log_every": 10,
    },
    "shakespeare-cpu": {
        **_DECAY,
        "dataset": "shakespeare",
        "seq_length": 64,
        "global_batch_size": 12,
        "lr": 1e-3,
        "warmup": 100,
        # The validation loss is lower by 0.02 than with cosine, after as many steps.
        "lr_schedule": "wsd",
        "decay": 1400,
        "max_iters": 2000,
        "eval_every": 500,
        "checkpoint_every": 1000,
        # All of the text's last tenth.
        "eval_batches": 145,
        "log_every": 10,
    },
    "gpt2": {**_DECAY, "seq_length": 1024, "lr": 6e-4, "warmup": 100},
    "llama-1b": {**_DECAY, "seq_length": 2048, "lr": 3e-4, "warmup": 100},
}
_NANOGPT: dict[str, Any] = {**_DECAY, "log_every": 10, "eval_train": True}
# For --model gpt: nanoGPT's config/train_gpt2.py, config/train_shakespeare_char.py, and what its README changes of the
# latter for a CPU.
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
        # 5 of 480 are as many samples as nanoGPT's 200 of 12.
        "eval_batches": 5,
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
# Pairs of a flag and a preset's flag that it contradicts: the preset's is left out if the other one is given.
CONTRADICTED = (
    ("text", "dataset"),
    ("text", "tokenizer"),
    ("batch_size", "global_batch_size"),
    ("lr_schedule", "decay"),
    ("epochs", "max_iters"),
)


def preset_defaults(flags: Mapping[str, str]) -> dict[str, Any]:
    """The defaults of flags that a preset sets; empty without such a preset.

    What contradicts a flag is left out: the data set if there is ``--text``, the global batch if there is a batch for
    each data-parallel coordinate, the length of the decay if there is ``--lr_schedule``, the steps if there are
    ``--epochs``.

    Args:
        flags: the flags that were given, by name, their values as text.
    """
    presets = GPT_TRAINING if flags.get("model") == "gpt" else TRAINING
    preset = flags.get("preset")
    if preset not in presets:
        return {}
    defaults = {"preset": preset, **presets[preset]}
    for flag, name in CONTRADICTED:
        if flag in flags:
            defaults.pop(name, None)
    # SGD has neither betas nor weight decay.
    if flags.get("optimizer") == "sgd":
        for name in ("betas", *_DECAY):
            defaults.pop(name, None)
    return defaults
