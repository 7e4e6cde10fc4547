"""The README's picture: one training on one device and on five meshes of four ranks, and one loss curve.

    python benchmarks/same_loss.py [--steps 60] [--out docs/same-loss.svg]

Trains the guide's Transformer in float64 with `mmm.trainer.lm`, once for each layout, from the same seed and with the
same global batch. Draws all losses in one picture and prints how much they differ. Exit code 1 if by more than 1e-9.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import mmm.history

# Relative.
BOUND = 1e-9
# Name in the picture → number of ranks, and the flags that make the layout.
LAYOUTS = {
    "one device": (1, []),
    "dp4 (FSDP)": (4, []),
    "dp2·tp2": (4, ["--tp", "2"]),
    "pp2·dp2": (4, ["--pp", "2"]),
    "dp2·cp2": (4, ["--cp", "2"]),
    "pp2·tp2": (4, ["--pp", "2", "--tp", "2"]),
}
MODEL = "--preset debug --dtype fp64 --global_batch_size 16 --eval_every 0 --no_plots"
# One for each mesh, in matplotlib's letters.
MARKERS = "os^Dvp"


def losses(ranks: int, layout: list[str], steps: int, folder: Path) -> np.ndarray:
    """Train on a layout. Returns the loss of each step: (steps,)."""
    launch = [sys.executable, "-m", "mmm_launch", "-n", str(ranks), "--device", "cpu"]
    program = ["python3", "-m", "mmm.trainer.lm"]
    flags = [*MODEL.split(), *layout, "--max_iters", str(steps), "--outdir", str(folder)]
    subprocess.run([*launch, *program, *flags], check=True, stdout=subprocess.DEVNULL)
    return mmm.history.load(folder)["loss"].values


def draw(curves: dict[str, np.ndarray], difference: float, out: Path) -> None:
    """Draw the curve of one device as a line, and on it the losses of each mesh as markers."""
    # The same file from the same numbers.
    plt.rcParams["svg.hashsalt"] = "mmm"
    figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
    one_device, *meshes = curves
    axes.plot(curves[one_device], color="0.75", linewidth=5, label=one_device, zorder=1)
    for place, (name, marker) in enumerate(zip(meshes, MARKERS, strict=False)):
        # Each mesh has its markers at other steps, so that none hides another.
        steps = np.arange(place, len(curves[name]), len(meshes))
        axes.plot(steps, curves[name][steps], marker, markersize=6, label=name)
    axes.set_title("The same training on six layouts: one loss curve", loc="left", fontweight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss")
    axes.text(0.02, 0.06, f"largest difference between two layouts: {difference:.0e}", transform=axes.transAxes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "same-loss.svg")
    args = parser.parse_args()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (ranks, layout) in LAYOUTS.items():
            # Names of layouts do not do for folders.
            outdir = Path(folder) / f"run{len(curves)}"
            curve = losses(ranks, layout, args.steps, outdir)
            print(f"{name:12} {ranks} ranks: loss {curve[0]:.4f} … {curve[-1]:.4f}", flush=True)
            curves[name] = curve
    # (layouts, steps)
    together = np.stack(list(curves.values()))
    lowest = together.min(axis=0)
    spread = together.max(axis=0) - lowest
    difference = float((spread / lowest).max())
    print(f"largest relative difference: {difference:.1e} (bound {BOUND})")
    draw(curves, difference, args.out)
    # A NaN is not within the bound, either.
    return int(not difference <= BOUND)


if __name__ == "__main__":
    sys.exit(main())
