"""``parity(…)``: the command, in a new process that has imported PyTorch and computed nothing."""

import contextlib
import os
import sys
import tempfile
from types import SimpleNamespace

import pytest

import mmm_lab.parity.run  # noqa: F401
from mmm_lab.parity.__main__ import main
from support import parity_bugs
from support.clock import PATIENCE


def command(rank, arguments, cwd, bug):
    """Run it here, with a bug of `support.parity_bugs`, which the ranks have too: they are forked later."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.chdir(cwd)
        sys.path.insert(0, cwd)  # as `python -m` does
        if bug:
            getattr(parity_bugs, bug)()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(arguments)
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 98
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return SimpleNamespace(code=code, out=texts[0], err=texts[1])


@pytest.fixture
def parity(run_on_ranks, tmp_path_factory):
    """``parity("--model", "cnn", …, bug="", cwd=None)`` → code, out, err; cwd is a new folder if None."""

    def run(*arguments, bug="", cwd=None):
        cwd = tmp_path_factory.mktemp("parity") if cwd is None else cwd
        (done,) = run_on_ranks(command, 1, [*map(str, arguments)], str(cwd), bug, timeout=PATIENCE, fresh=True)
        return done

    return run
