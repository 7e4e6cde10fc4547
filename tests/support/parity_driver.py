"""Runs ``python3 -m mmm.parity …`` again and again, each in a fork of this process, which has imported PyTorch once.

A line of JSON in, {"arguments": […], "cwd": …, "bug": …}, one out, {"code": …, "out": …, "err": …}. A bug is a function
of `support.parity_bugs`, called before the command: the ranks, forked later still, have it too.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import xarray  # noqa: F401

import mmm.parity.report
import mmm.parity.run  # noqa: F401
from mmm.parity.__main__ import main
from support import parity_bugs


def work(request, out, err) -> None:
    code = 99
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.chdir(request["cwd"])
        sys.path.insert(0, request["cwd"])  # as `python -m` does
        if request["bug"]:
            getattr(parity_bugs, request["bug"])()
        code = main(request["arguments"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 98
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            work(json.loads(line), out, err)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        print(json.dumps({"code": code, "out": out.read(), "err": err.read()}), flush=True)
os._exit(0)
