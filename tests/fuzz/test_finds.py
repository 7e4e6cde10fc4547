"""The fuzzer as it is started: it finds bugs that are planted, and none in what stands."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.clock import PATIENCE
from support.signals import as_from_a_terminal

TESTS = Path(__file__).parent.parent
# Each bug in a case, one after the other: on one rank, where there is none, equal cases are computed once.
PLANTED = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from fuzz.__main__ import Fuzzer
from fuzz.draw import Case
from support import fuzz_bugs
twins = {}
for words in map(str.split, sys.argv[2:]):
    bug, dtype, shrink, *more = words
    fuzzer = Fuzzer(Path(sys.argv[1]), getattr(fuzz_bugs, bug, None))
    fuzzer.twins = twins
    flags = dict(device="cpu", log_all_ranks="on", plots="off",
                 max_iters="3", optimizer="sgd", lr="0.3", max_norm="0.05", dtype=dtype,
                 preset="debug", n_layers="1", dim="8", n_heads="2", n_kv_heads="2", ffn_dim="8", seq_length="8",
                 global_batch_size="4", text=str(fuzzer.data / "words.txt"))
    flags |= dict(word.split("=") for word in more)
    verdict = fuzzer.take(Case("0/0", "lm", 2, flags), float(shrink))
    fuzzer.summary()
    print(f"that was {bug}: {int(verdict.fault)}", flush=True)
"""
SAID = {
    "none": "1 equal",
    "other_samples": "fp64 loss: row 0",
    "crash": "crashed: rank 1: IndexError: planted",
    "refused_alone": "the ranks do not agree",
    "leftover": "the run has left notes.txt",
    "late_refusal": "refused after the record was begun",
    "another_scale": "they skip different steps",
}


def environment():
    return {**os.environ, "PYTHONPATH": str(TESTS)}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Of each bug whether its case is faulty, and what the fuzzer says."""
    cases = [f"{bug} {'fp16' if bug == 'another_scale' else 'fp64'} 0" for bug in SAID]
    cases.append("gradients_averaged fp64 1 max_norm=0")
    words = [sys.executable, "-c", PLANTED, tmp_path_factory.mktemp("planted"), *cases]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"(.*?)that was (\w+): (\d)\n", done.stdout, re.DOTALL)
    return {bug: (fault == "1", said) for said, bug, fault in found}


@pytest.mark.long
def test_a_wrong_gradient_is_found_and_the_case_made_smaller(planted):
    faulty, said = planted["gradients_averaged"]
    assert faulty
    assert re.search(r"different +.* s +fp64 loss: row 1 is [\d.]+, on one rank", said), said
    (small,) = re.findall("shrunk: (.*)", said)
    assert small.startswith("launch -n 2 --device cpu python3 -m mmm.trainer.lm")
    assert "--log_all_ranks" in said
    assert "--log_all_ranks" not in small  # the first that is tried to be left out
    assert "--dim 8" in small


@pytest.mark.long
@pytest.mark.parametrize("bug", SAID)
def test_planted_bugs(planted, bug):
    faulty, said = planted[bug]
    assert (SAID[bug] in said, faulty) == (True, bug != "none"), said


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


@pytest.mark.long
def test_some_cases(tmp_path):
    """The same ones each time: `make fuzz` is for new ones."""
    command = fuzz("--cases", "6", "--minutes", "9", "--seed", "0", "--scratch", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " equal" in done.stdout
