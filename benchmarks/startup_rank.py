"""The program that ``benchmarks/startup.py --curve`` starts: import what the examples import, make the process group,
leave.

It prints ``up RANKS TIME`` once all ranks have met. ``startup_rank.py import`` ends after the imports.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed.checkpoint
import torch.distributed.pipelining

from mmm.examples import fsdp_tp  # noqa: F401
from mmm.run import standard  # noqa: F401
from mmm.run.command_line import run_main
from mmm.runtime.process_group import gather_floats, process_group
from mmm.runtime.ranks import whoami

CPU = torch.device("cpu")


def main() -> None:
    if "import" in sys.argv[1:]:
        return
    rank = whoami()
    with process_group(rank, CPU, timeout=120):
        everyone = gather_floats([time.time()], CPU)
        if rank.is_main:
            print(f"up {len(everyone)} {max(moment for (moment,) in everyone):.6f}", flush=True)


if __name__ == "__main__":
    run_main(main)
