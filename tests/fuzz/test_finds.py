"""The fuzzer as it is started: it finds a bug that is planted, and none in what stands."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.draw import draw
from support.clock import PATIENCE
from support.signals import as_from_a_terminal

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
assert fuzzer.take(Case("0/0", "lm", 2, flags), 1.0).fault
fuzzer.summary()
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(TESTS)}


@pytest.mark.long
def test_a_wrong_gradient_is_found_and_the_case_made_smaller(tmp_path):
    words = [sys.executable, "-c", PLANTED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert re.search(r"different +.* s +fp64 loss: row 1 is [\d.]+, on one rank", said), said
    (small,) = re.findall("shrunk: (.*)", said)
    assert small.startswith("launch -n 2 --device cpu python3 -m mmm.trainer.lm")
    assert "--log_all_ranks" in said
    assert "--log_all_ranks" not in small  # the first that is tried to be left out
    assert "--dim 8" in small


def test_a_switch_that_only_some_models_have_is_not_drawn_for_the_others(tmp_path):
    drawn = [draw(0, number, tmp_path) for number in range(400)]
    tied = [case for case in drawn if case.flags.get("tie_word_embeddings") == "on" and not case.spoilt]
    assert any(case.ranks > 1 for case in tied)
    assert not [case for case in tied if case.flags.get("model") == "gpt" or "init_from" in case.flags]


def fuzz(*words):
    return [sys.executable, "-m", "fuzz", *words]


@pytest.mark.long
def test_ctrl_c_ends_it_with_the_summary(tmp_path):
    command = fuzz("--minutes", "5", "--seed", "4", "--scratch", str(tmp_path))
    piped = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": as_from_a_terminal()}
    with subprocess.Popen(command, **piped, env=environment(), cwd=tmp_path) as running:
        for line in running.stdout:
            if " equal " in line or " refused " in line:
                break
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()
        assert running.wait(PATIENCE) in (0, 1)
    assert "stopped" in rest
    assert re.search(r"\d+ cases, [\d.]+ s each: ", rest)


INTERRUPTED = """
import sys
import fuzz.__main__ as fuzz
fuzz.draw = lambda *_: exec("import signal; signal.raise_signal(signal.SIGINT)")
sys.exit(fuzz.main(["--scratch", sys.argv[1]]))
"""


@pytest.mark.long
def test_ctrl_c_while_a_dataclass_is_made_ends_it_as_well(tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "interrupted", str(tmp_path)]
    piped = {"capture_output": True, "text": True, "preexec_fn": as_from_a_terminal()}
    done = subprocess.run(command, **piped, timeout=PATIENCE, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stopped" in done.stdout


@pytest.mark.long
def test_some_cases(tmp_path):
    """The same ones each time: `make fuzz` is for new ones."""
    command = fuzz("--cases", "6", "--minutes", "9", "--seed", "0", "--scratch", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " equal" in done.stdout
