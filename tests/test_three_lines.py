"""What the three lines of the README print, as docs/three-lines.md has it: its first 20 lines, and its last 30.

MMM_WRITE_DOCS=1 writes the page anew.
"""

import os
import re
import socket
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "three-lines.md"
LINES = (
    "launch python3 -m mmm.examples.fsdp_tp --tpsize 4",
    "launch python3 -m mmm.trainer.vit --max_iters 10",
    "launch python3 -m mmm.examples.fsdp --epochs 2",
)
FIRST, LAST = 20, 30
DRAWN = re.compile(r"[─│┤└┘┌┐▀▄▚▞▌▐▖▗▘▝]")


def printed(line, folder):
    """What a line prints where there is no network, without what every machine has of its own."""
    program = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}"}
    environment |= dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    done = subprocess.run(
        line.split(), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "vm", done.stdout).replace(str(folder), "~")
    return re.sub(r"downloaded \(.*?\)\. ", "downloaded (…). ", text).splitlines()


def masked(lines):
    """Lines without numbers and the widths that these need, a plot as one line."""
    left = [line for line in lines if not re.search(r"\brows? (above|below) the plot", line)]
    words = ["plot" if DRAWN.search(line) else re.sub(r"\d[\d.,:e+-]*", "0", line) for line in left]
    words = [" ".join(word.split()) for word in words]
    words = ["plot" if re.fullmatch(r"((iter|epoch|0) ?)+", word) else word for word in words]  # an axis of one
    return [word for word, _ in groupby(word for word in words if word)]


def excerpts():
    """Line: its first and its last lines, of the page."""
    blocks = re.findall(
        r"^## `(.*?)`\n+```\n(.*?)\n```\n+…\n+```\n(.*?)\n```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return {line: (first.splitlines(), last.splitlines()) for line, first, last in blocks}


def test_the_readme_has_the_three_lines():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(re.search(rf"^{re.escape(line)}( |$)", readme, re.MULTILINE) for line in LINES)
    assert "(docs/three-lines.md)" in readme
    assert tuple(excerpts()) == LINES


def test_a_mask_leaves_words():
    plot = ["  │▗▄▖  │", "2.1┤ ▝▀▄ │", "  └┬────┘", "   0    5", "     iter", "  1 row above the plot: 3 s at iter 0"]
    assert masked([*plot, "", "iter=0 loss=5.61 dt=0.4", "4 ranks  12"]) == [
        "plot",
        "iter=0 loss=0 dt=0",
        "0 ranks 0",
    ]


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
def test_what_a_line_prints_is_what_the_page_says(line, tmp_path):
    lines = printed(line, tmp_path)
    if os.environ.get("MMM_WRITE_DOCS"):
        pattern = rf"(?s)(## `{re.escape(line)}`\n+```\n).*?(\n```\n+…\n+```\n).*?(\n```\n)"
        parts = ("\n".join(lines[:FIRST]), "\n".join(lines[-LAST:]))
        text = re.sub(pattern, lambda found: f"{found[1]}{parts[0]}{found[2]}{parts[1]}{found[3]}", PAGE.read_text())
        PAGE.write_text(text)
    first, last = excerpts()[line]
    assert (len(first), len(last)) == (FIRST, LAST)
    whole = masked(lines)
    assert whole[: len(masked(first))] == masked(first)
    assert whole[-len(masked(last)) :] == masked(last)
