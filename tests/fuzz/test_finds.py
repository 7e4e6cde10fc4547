"""The fuzzer as it is started: it finds a bug that is planted, and none in what stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.draw import draw
from support.clock import PATIENCE

TESTS = Path(__file__).parent.parent
PLANTED = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from fuzz.__main__ import Fuzzer
from fuzz.draw import Case
from support.parity_bugs import gradients_averaged_over_dp
fuzzer = Fuzzer(Path(sys.argv[1]), lambda rank: gradients_averaged_over_dp())
flags = dict(device="cpu", log_all_ranks="on", plots="off",
             max_iters="3", optimizer="sgd", lr="0.3", max_norm="0", dtype="fp64",
             preset="debug", n_layers="1", dim="8", n_heads="2", n_kv_heads="2", ffn_dim="8", seq_length="8",
             global_batch_size="4", text=str(fuzzer.data / "words.txt"))
assert fuzzer.take(Case("0/0", "lm", 2, flags)).fault
fuzzer.summary()
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(TESTS)}


@pytest.mark.long
def test_a_wrong_gradient_is_found(tmp_path):
    command = [sys.executable, "-c", PLANTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout
    assert re.search(r"different +.* s +fp64 loss: row 1 is [\d.]+, on one rank", output), output
    assert "launch -n 2 --device cpu python3 -m mmm.trainer.lm" in output


def test_a_switch_that_only_some_models_have_is_not_drawn_for_the_others(tmp_path):
    drawn = [draw(0, index, tmp_path) for index in range(400)]
    tied = [case for case in drawn if case.flags.get("tie_word_embeddings") == "on" and not case.spoilt]
    assert any(case.ranks > 1 for case in tied)
    assert not [case for case in tied if case.flags.get("model") == "gpt" or "init_from" in case.flags]


def fuzz(*argv):
    return [sys.executable, "-m", "fuzz", *argv]


@pytest.mark.long
def test_some_cases(tmp_path):
    """The same ones each time: `make fuzz` is for new ones."""
    command = fuzz("--cases", "6", "--minutes", "9", "--seed", "0", "--scratch", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " equal" in done.stdout
