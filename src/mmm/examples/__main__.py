"""``python -m mmm.examples``, ``mmm examples``: lists the runnable modules, each with the first line of its docstring.

It reads their sources and imports none of them, because that would import torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN_AS_A_PROGRAM = '\nif __name__ == "__main__":\n'
EPILOG = """\
examples:
  mmm examples
  python3 -m mmm.examples.fsdp_tp --help
exit codes: 0 listed, 2 wrong arguments"""
HOW_TO_RUN = """
Run one on every local rank, or on one device:
  launch python3 -m mmm.examples.fsdp_tp --tpsize 4
  python3 -m mmm.examples.fsdp_tp"""


def runnable_modules() -> dict[str, str]:
    """The first line of the docstring of every module in examples/ and trainer/ that can be run, by its name."""
    modules = {}
    for room in ("examples", "trainer"):
        # _support/ and this file are not for running.
        for path in sorted((ROOT / room).glob("[!_]*.py")):
            source = path.read_text(encoding="utf-8")
            if RUN_AS_A_PROGRAM in source:
                first_line = source.partition("\n")[0]
                modules[f"mmm.{room}.{path.stem}"] = first_line.strip('"')
    return modules


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "mmm examples",
        description="List the runnable examples and trainers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    modules = runnable_modules()
    width = max(map(len, modules))
    for name, first_line in modules.items():
        print(f"{name:<{width}}  {first_line}")
    print(HOW_TO_RUN)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
