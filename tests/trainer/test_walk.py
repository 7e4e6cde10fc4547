"""How many files of the package a reader goes through to follow a program's configuration."""

import gc
import sys
from pathlib import Path

import torch

import mmm
from mmm.examples import fsdp_tp
from mmm.parallel import Techniques
from mmm.runtime.clock import StepClock
from mmm.trainer.config.run import BaseOptions
from mmm.trainer.config.spec import RunSpec

ROOT = Path(mmm.__file__).parent
CARRIERS = (fsdp_tp.Config, BaseOptions, Techniques, RunSpec)  # the flags, and what they become


class FirstStep(Exception):
    pass


def files_entered(function) -> tuple[set[str], set[str]]:
    """Files with a function that is called until the first step: all, and those that are given the configuration."""
    entered, given = set(), set()

    def profile(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(ROOT)):
            name = str(Path(file).relative_to(ROOT))
            entered.add(name)
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals.get(argument), CARRIERS) for argument in arguments):
                given.add(name)

    gc.collect()
    gc.disable()  # what other tests have left may be finalized at any time, and is not on the way
    sys.setprofile(profile)
    try:
        function()
    except FirstStep:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered, given


def test_the_main_examples_configuration_is_followed_in_few_files(monkeypatch, tmp_path, capsys):
    def stop(clock):
        sys.setprofile(None)  # what the record does at the end is not on the way
        raise FirstStep

    monkeypatch.setattr(StepClock, "start", stop)
    monkeypatch.setattr(sys, "argv", ["fsdp_tp", "--preset", "debug", "--device", "cpu", "--outdir", str(tmp_path)])
    entered, given = files_entered(lambda: fsdp_tp.train(fsdp_tp.example.parse(fsdp_tp.Config, fsdp_tp.__doc__)))
    torch.distributed.destroy_process_group()  # a run that does not end leaves it
    assert "examples/fsdp_tp.py" in given
    assert len(given) <= 14, sorted(given)
    assert len(entered) <= 57, "\n".join(sorted(entered))
