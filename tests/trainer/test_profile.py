"""--profile: one trace of all ranks of a run; a page of Python's calls; what fails costs a warning."""

import gzip
import json
import socket
import time

import pytest
import torch

from mmm.errors import ConfigError
from mmm.history import load
from mmm.runtime.clock_offset import clock_offset
from mmm.runtime.ranks import whoami
from mmm.testing import ranks
from mmm.trainer import lm, profile
from support.launcher import launch
from test_trace_file import check_for_perfetto, flows

FLAGS = {"preset": "debug", "seq_length": 16, "batch_size": 2, "plots": False, "device": "cpu", "eval_batches": 1}


def train(outdir, **flags):
    lm.train(lm.Config(**{**FLAGS, "max_iters": 3, "profile_steps": "1:3", "outdir": outdir, **flags}))
    return json.loads((outdir / "config.json").read_text())


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))
