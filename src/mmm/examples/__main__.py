"""``python -m mmm.examples``, ``mmm examples``: the runnable modules, each with the first line of its docstring.

Reads sources, imports none.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def runnable_modules() -> dict[str, str]:
    """Module name → first line of its docstring, for every file in examples/ and trainer/ that can be run."""
    found = {}
    for room in ("examples", "trainer"):
        for path in sorted((ROOT / room).glob("*.py")):
            if path.stem.startswith("_"):
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if any(isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in tree.body):
                doc = ast.get_docstring(tree) or ""
                found[f"mmm.{room}.{path.stem}"] = doc.split("\n", 1)[0]
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("mmm examples", description="List the runnable examples and trainers.")
    parser.parse_args(argv)
    modules = runnable_modules()
    width = max(map(len, modules))
    for name, about in modules.items():
        print(f"{name:<{width}}  {about}")
    print(
        "\nRun one on every local rank, or on one device:\n"
        "  launch python3 -m mmm.examples.fsdp_tp --tpsize 4\n"
        "  python3 -m mmm.examples.fsdp_tp"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
