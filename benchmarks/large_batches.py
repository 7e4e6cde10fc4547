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

IMAGES = 1437  # to train on
BASE = 16  # the batch that RATES are for
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
    """Train for these epochs. Returns the test accuracy in percent."""
    optimizer, scale, warms_up = SETTINGS[setting]
    flags = {"optimizer": optimizer, "lr": RATES[optimizer], "scale_lr": scale, "warmup": 0}
    if warms_up:
        flags["warmup"] = epochs * (IMAGES // batch) // 5
    if scale != "none":
        flags["base_batch_size"] = BASE
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
        except Exception as error:
            # A rate that is too large: no number is left.
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
    print_row("", [f"{batch:,}" for batch in batches])
    print_row("---", ["---"] * len(batches))
    print_row("*steps*", [f"{args.epochs * (IMAGES // batch):,}" for batch in batches])
    began = time.perf_counter()
    for setting in settings:
        cells = []
        for batch in batches:
            by_seed = [accuracy(setting, batch, args.epochs, seed) for seed in range(args.seeds)]
            cells.append(f"{statistics.median(by_seed):.1f}")
        print_row(setting, cells)
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)


def print_row(name: str, cells: list[str]) -> None:
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
