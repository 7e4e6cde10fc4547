"""The same number of epochs in fewer, larger steps: what scaling the learning rate and warm-up are worth.

    python benchmarks/large_batches.py [--epochs 20] [--batches 16,64,256,1024] [--only "adamw sqrt"] [--seeds 1]

Trains `mmm.trainer.vit` on the digits that come with the package (1,437 to train on, 360 to test on; four patches of
4 × 4 pixels), on one rank. The rate of each optimizer is the best of a few at a batch of 16; --scale_lr makes that of
the larger batches. Prints a table in Markdown: test accuracy in percent, of several seeds the median. Minutes on two
cores.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import mmm.history
from mmm.run.command_line import configure
from mmm.trainer import vit

IMAGES, BASE = 1437, 16
RATES = {"sgd": 1.0, "adamw": 1e-3}
# Setting: optimizer, --scale_lr, and whether the first fifth of the run is warm-up.
SETTINGS = {
    "sgd": ("sgd", "none", False),
    "sgd linear": ("sgd", "linear", False),
    "sgd linear, warm-up": ("sgd", "linear", True),
    "adamw": ("adamw", "none", False),
    "adamw sqrt": ("adamw", "sqrt", False),
    "adamw sqrt, warm-up": ("adamw", "sqrt", True),
    "adamw linear, warm-up": ("adamw", "linear", True),
}


def accuracy(setting: str, batch: int, epochs: int, seed: int) -> float:
    """Of a run of these epochs: test accuracy in percent."""
    optimizer, scale, warms = SETTINGS[setting]
    steps = epochs * (IMAGES // batch)
    flags = {"optimizer": optimizer, "lr": RATES[optimizer], "scale_lr": scale, "warmup": steps // 5 if warms else 0}
    flags |= {} if scale == "none" else {"base_batch_size": BASE}
    with tempfile.TemporaryDirectory() as folder:
        config = configure(
            vit.Config,
            **flags,
            preset="debug",
            dataset="digits",
            image_size=8,
            patch_size=4,
            parallel="ddp",
            log_every=10**6,
            channels=1,
            global_batch_size=batch,
            epochs=epochs,
            seed=seed,
            device="cpu",
            plots=False,
            on_nan="skip",
            outdir=Path(folder, "run"),
        )
        try:
            vit.train(config)
        except Exception as error:  # a rate that is too large: no number is left
            print(f"{setting}, {batch}: {error}", file=sys.stderr)
            return 0.0
        return float(mmm.history.load(Path(folder, "run"))["test_acc"].dropna("draw")[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batches", default="16,64,256,1024")
    parser.add_argument("--only", choices=SETTINGS, help="one setting")
    parser.add_argument("--lr", type=float, help="with --only, another rate")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    batches = [int(word) for word in args.batches.split(",")]
    settings = [args.only] if args.only else list(SETTINGS)
    if args.lr:
        RATES[SETTINGS[settings[0]][0]] = args.lr
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    print(f"{args.epochs} epochs; torch {torch.__version__}, {os.cpu_count()} cores; rates at {BASE}: {RATES}\n")
    print("| | " + " | ".join(f"{batch:,}" for batch in batches) + " |\n| --- |" + " --- |" * len(batches))
    print("| *steps* | " + " | ".join(f"{args.epochs * (IMAGES // batch):,}" for batch in batches) + " |", flush=True)
    began = time.perf_counter()
    for setting in settings:
        of_batch = []
        for batch in batches:
            found = [accuracy(setting, batch, args.epochs, seed) for seed in range(args.seeds)]
            of_batch.append(f"{statistics.median(found):.1f}")
        print(f"| {setting} | {' | '.join(of_batch)} |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
