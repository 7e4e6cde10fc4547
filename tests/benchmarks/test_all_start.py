"""Every program in benchmarks/ runs at its smallest size. What it measures there says nothing; that it ends does."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.clock import PATIENCE

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
LAUNCH = "-m mmm_launch --device cpu -n"

# A line each, as behind `python`, in a folder of its own with a text.
SMALLEST = [
    "arrays.py --megabytes 40 --batch 2 --steps 2",
    f"{LAUNCH} 4 python3 bare_fsdp_tp.py --tp 2 --layers 1 --batch 2 --seq 16 --steps 2",
    "bare_nanogpt.py --text text --steps 2",
    f"{LAUNCH} 4 python3 bare_vision.py --model vit --tp 2 --batch 4 --steps 2",
    f"{LAUNCH} 1 python3 bare_vision.py --model cnn --batch 4 --steps 2",
    "-m torch.distributed.run --nproc-per-node 2 compiled_async_input.py",
    "documents.py --seq_length 128 --lengths 32 --dim 32 --layers 1 --pairs 1",
    "fingerprints.py --preset debug --dataset random --seq_length 16 --global_batch_size 2",
    "guide_curves.py ddp --out .",
    "guide_tree.py --out tree.svg",
    "kills.py --kills 1",
    "known_bugs.py --only router",
    "large_batches.py --epochs 1 --batches 1024 --only 'adamw sqrt'",
    "local_tensors.py --pairs 1 --dims 32",
    "plan_accuracy.py --only 'llama ddp'",
    "plan_known.py",
    "plan_times.py --repeats 1 --only 'one device' 'one device, batch 2'",
    "reading.py --tokens 1e5 --steps 2",
    "same_bits.py bits --steps 1 --ranks 1",
    "same_bits.py cost --dim 32 --pairs 1",
    "same_loss.py --steps 1 --out loss.svg",
    "save_cost.py --parameters 1e4 --tensors 2 --pairs 1 --ranks 1 --steps 1",
    "scale.py --ranks 64 --layout hsdp·tp8 --png scale.png",
    "shakespeare.py --text text --steps 2",
    "startup.py --pairs 1 --ranks 2",
    "startup.py --curve --ranks 1 2 --ways forked --png curve.png",
    f"{LAUNCH} 2 python3 startup_rank.py",
    "step_overhead.py --program vit --layout 1 --pairs 1 --steps 7",
    "step_parts.py --only row",
    f"torch_versions.py {sys.executable} --models cnn-dp2-fp64 --tests {ROOT}/tests/mmm/test_units.py",
    "where_bits_leak.py",
]


@pytest.mark.long
@pytest.mark.parametrize("line", SMALLEST)
def test_it_starts_and_ends(tmp_path, line):
    """Exit code 1 is a bound that was missed, as it may be at this size, or on a machine with other work."""
    text = "".join(path.read_text("utf-8") for path in sorted(BENCHMARKS.glob("*.py")))
    (tmp_path / "text").write_text(text[:30_000])
    argv = [str(BENCHMARKS / word) if word.endswith(".py") else word for word in shlex.split(line)]
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip() or len(os.listdir(tmp_path)) > 1, "it has printed nothing, and left no file"


def test_none_is_left_out():
    """Files that another benchmark imports are no programs. Three install other libraries, or versions of them; two are
    started by the tests of what they measure."""
    texts = {path.name: path.read_text("utf-8") for path in BENCHMARKS.glob("*.py")}
    imported = {f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", "\n".join(texts.values()), re.MULTILINE)}
    # Not the tests that a line names by their path.
    started = set(re.findall(r"(?<![\w/])\w+\.py", " ".join(SMALLEST)))
    elsewhere = {"frameworks.py", "plans.py", "advisories.py", "elastic.py", "faults.py"}
    assert texts.keys() - imported - elsewhere == started


@pytest.mark.long
def test_a_pytest_that_does_not_come_to_its_tests_is_no_right_row():
    """Of no model there is nothing right and nothing wrong, as of one that is misspelt."""
    line = [sys.executable, str(BENCHMARKS / "torch_versions.py"), sys.executable, "--models", "gpd", "--tests"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stdout
    *_, right, refused, wrong, _, _, _ = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert (right, refused, wrong) == ("0", "0", "1")
