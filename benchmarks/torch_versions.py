"""What each PyTorch can do: a row of the table in docs/install.md for each Python that has one.

    python benchmarks/torch_versions.py .venv-torch-2.10.0/bin/python .venv-torch-2.8.0/bin/python
        [--models WORDS] [--tests PATH …] [--rows FILE] [--results FOLDER]

`make test-torch TORCH=2.10.0` makes such a Python. Each compares the layouts of the parity matrix, up to 4 ranks, with
one device: right, refused by a row of `mmm.torch_private.faults.FAULTS`, or wrong, which also counts errors. Then it
runs the tests: passed, skipped by a row, failed. The rows are printed as they come, and added to --rows. --results
keeps what pytest prints, also of a run that is ended. Exit code 1 if something was wrong or failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
HEAD = "| PyTorch | Python | parity: right | refused | wrong | tests: passed | skipped | failed |"
LINE = "| --- " * HEAD.count(" | ") + "| --- |"
MATRIX = ["-m", "long or not long", "tests/mmm_lab/parity/test_matrix.py"]
# So begins the reason of a test that a row skips.
BY_A_ROW = "this PyTorch cannot do"


def versions(python: str) -> tuple[str, str]:
    """PyTorch's and Python's."""
    program = "import platform, torch; print(torch.__version__, platform.python_version())"
    torch_version, python_version = subprocess.check_output([python, "-c", program], text=True).split()
    return torch_version, python_version


def run(python: str, arguments: list[str], folder: Path, name: str) -> tuple[int, int, int]:
    """How many tests pass, are skipped by a row, and fail. That pytest has not come to its tests is a failure."""
    result = folder / f"{name}.xml"
    command = [python, "-m", "pytest", f"--junitxml={result}", *arguments]
    printed = folder / f"{name}.log"
    with printed.open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    # 0: all have passed, 1: some have failed.
    if done.returncode not in (0, 1):
        print(printed.read_text(), file=sys.stderr)
        return 0, 0, 1
    passed = skipped = failed = 0
    for case in ElementTree.parse(result).iter("testcase"):
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
            print(f"failed: {case.get('classname')} {case.get('name')}", file=sys.stderr)
        elif reason is None:
            passed += 1
        elif BY_A_ROW in reason.get("message", ""):
            skipped += 1
    return passed, skipped, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", help="a Python that has a PyTorch and mmm's other packages")
    parser.add_argument("--models", default="", help='as for pytest -k, such as "vit or gpt" (default: all)')
    parser.add_argument("--tests", nargs="*", default=["tests"], help="for pytest; none: no tests (default: tests)")
    parser.add_argument("--rows", type=Path, help="file to which rows are added")
    parser.add_argument("--results", type=Path, help="folder in which results are kept (default: none are)")
    args = parser.parse_args()
    # The mmm of this tree, whatever is installed.
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    bad = 0
    print(HEAD, LINE, sep="\n")
    for python in args.python:
        torch_version, python_version = versions(python)
        with tempfile.TemporaryDirectory() as name:
            folder = (args.results or Path(name)) / torch_version
            folder.mkdir(parents=True, exist_ok=True)
            cases = run(python, [*MATRIX, "-k", args.models], folder, "parity")
            results = (0, 0, 0)
            if args.tests:
                results = run(python, args.tests, folder, "tests")
        columns = [torch_version, python_version, *cases, *results]
        row = f"| {' | '.join(map(str, columns))} |"
        print(row, flush=True)
        if args.rows is not None:
            with args.rows.open("a") as file:
                print(row, file=file)
        bad += cases[2] + results[2]
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
