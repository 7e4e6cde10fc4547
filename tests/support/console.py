"""Blocks of a page that show a terminal: each command is run, and what it prints is compared with what the page says.

    ```console
    $ command                 run by bash, in a folder of the page's own; its output follows
    words of the output
    …                         any lines
    loss 2.61 … tokens/s      any text inside a line
    ```

Words have to be equal. So do whole numbers; others may differ by `TOLERANCE`. Times, rates, dates, paths of this
machine, its name, ports and pids are free, and so are the points of a plot. A command that fails has to show it: some
of its output is written down. A block whose first
line is ``# name.py``, ``# name.yaml`` or ``# name.sh`` (below
``#!…``) is that file.

MMM_WRITE_DOCS=1 writes the outputs anew. Lines that a page leaves out stay out.
"""

import os
import re
import socket
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from support.clock import PATIENCE
from support.pages import blocks

# The variable.
WRITE = "MMM_WRITE_DOCS"
GAP = "…"
TOLERANCE = 0.02
# What is smaller is float64's, and differs between machines.
ROUNDING = 1e-9
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
TIMED = r"s|ms|µs|us|min|h|d|MB/s|GB/s|MiB/s|GiB/s|Gbit/s|TFLOP/s|samples/s|tokens/s|t/s|i/s|steps/s"
# What differs from run to run, and from machine to machine: → a word that stands for it.
FREE = [
    (r"\d{4}-\d\d-\d\d[ T-]\d\d:?\d\d:?\d\d(?:\.\d+)?", "<time>"),
    (r"\bdownloaded \(.*?\)", "downloaded (…)"),
    # A line of the source.
    (r"\]\[\w+:\d+\] - ", "] - "),
    (r"\bleft=\S+", "left=<free>"),
    (rf"\b((?:dt|sps|tps)\w*|mfu|seconds|pid|port)([= ]){NUMBER}", r"\1\2<free>"),
    (rf"(?<![\w.])(?:{NUMBER}) (?:{TIMED})(?![\w/])", "<free>"),
    (r"\bsha256 [0-9a-f]{12,64}\b", "sha256 <free>"),
    (r"\b[0-9a-f]{7,40}\b(?=.*\bcommit\b)|(?<=commit )[0-9a-f]{7,40}", "<free>"),
]
POINTS = re.compile(r"[▀▄▚▞▌▐▖▗▘▝▛▜▙▟]")
FRAME = re.compile(r"[─│┤├└┘┌┐┬┴]")
# What stands below a plot: its axis, and what is outside.
BELOW = re.compile(
    rf"^(?:{NUMBER}|iter|epoch|tokens|hours|at (?:iter|epoch) {NUMBER}|)$|^\d+ rows? (?:above|below) the plot"
)


class Shown(NamedTuple):
    """A command of a page, and the lines of output that the page shows for it."""

    command: str
    lines: list[str]


def commands_of(text):
    """The commands of a block's text."""
    commands = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(Shown(line[2:], []))
        elif commands and not commands[-1].lines and commands[-1].command.endswith("\\"):
            commands[-1] = Shown(f"{commands[-1].command}\n{line}", [])
        elif commands:
            commands[-1].lines.append(line)
        else:
            raise ValueError(f"a console block begins with a command, and not with {line!r}")
    return commands


def run(commands, folder):
    """What each command prints, and its exit code; all in one bash, without a network."""
    mark = "=== the next command ==="
    script = "".join(f"{command}\nprintf '\\n{mark} %s\\n' $?\n" for command in commands)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    printed = re.split(rf"\n{mark} (\d+)\n", done.stdout)
    if len(printed) != 2 * len(commands) + 1:
        raise AssertionError(f"bash has ended early, or a command's quotes are open:\n{done.stdout}")
    return [
        (clean(text, folder).splitlines(), int(code)) for text, code in zip(printed[::2], printed[1::2], strict=False)
    ]


def environment(folder):
    """Where the programs are those of this environment, nothing is downloaded, and a line has 120 characters."""
    programs = Path(sys.executable).parent
    ours = {"PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "120", "XDG_CACHE_HOME": str(folder / "cache")}
    return os.environ | dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9") | ours


def clean(text, folder):
    """An output without what this machine has of its own."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "vm", text).replace(str(folder), "~")
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def plain(lines):
    """Lines with words for what is free, and a plot as one."""
    groups, start = [], 0
    while start < len(lines):
        end = start
        while end < len(lines) and (FRAME.search(lines[end]) or POINTS.search(lines[end])):
            end += 1
        drawn = lines[start:end]
        if any(POINTS.search(line) or re.search(r"^\s*[\d.e+-]+┤|└┬", line) for line in drawn):
            groups.append("<plot>")
            while end < len(lines) and all(BELOW.search(piece) for piece in re.split(r"\s{3,}", lines[end].strip())):
                end += 1
        else:
            end = max(end, start + 1)
            groups += [without_free(line) for line in lines[start:end]]
        start = end
    return [line for line in groups if line]


def without_free(line):
    for pattern, word in FREE:
        line = re.sub(pattern, word, line)
    return " ".join(line.split())


def same_line(shown, printed, compare_numbers=True):
    """Whether a printed line is one that a page shows; both from `plain`."""
    parts = [re.split(f"({NUMBER})", piece) for piece in shown.split(GAP)]
    expected = [value for piece in parts for value in piece[1::2]]
    pattern = ".*?".join(
        "".join(f"({NUMBER})" if index % 2 else re.escape(text) for index, text in enumerate(piece)) for piece in parts
    )
    match = re.fullmatch(pattern, printed)
    return match is not None and (not compare_numbers or all(map(close, expected, match.groups())))


def close(shown, printed):
    """Whether two numbers are the same: whole ones to the last digit."""
    a, b = (float(value.replace(",", "")) for value in (shown, printed))
    if re.fullmatch(r"[-+]?[\d,]+", shown):
        return a == b
    if max(abs(a), abs(b)) < ROUNDING:
        return True
    last = 10 ** -len(shown.partition(".")[2].partition("e")[0]) if "e" not in shown else 0
    return abs(a - b) <= max(TOLERANCE * max(abs(a), abs(b)), 1.01 * last)


def matches(shown, printed, compare_numbers=True):
    """Whether the lines that a page shows are the ones that are printed; both from `plain`."""
    # How many printed lines the lines up to here may stand for.
    reached = {0}
    for line in shown:
        if line == GAP:
            reached = set(range(min(reached), len(printed) + 1))
        else:
            reached = {
                index + 1
                for index in reached
                if index < len(printed) and same_line(line, printed[index], compare_numbers)
            }
        if not reached:
            return False
    return len(printed) in reached


def difference(shown, printed, code, compare_numbers=True):
    """What is wrong with a page's output; empty where nothing is."""
    expected = plain(shown.lines)
    lines = plain(printed)
    if not matches(expected, lines, compare_numbers):
        return "\n".join([f"$ {shown.command}", "the page shows:", *shown.lines, "it prints:", *printed])
    if code and not [line for line in expected if line != GAP]:
        return "\n".join([f"$ {shown.command}", f"fails with {code}, and the page does not show it:", *printed])
    return ""


def anew(shown, printed):
    """The lines of a page for what is printed now: those that the page has with other numbers, where its words are
    still right; else as many before and after what it leaves out as it had."""
    if GAP not in shown.lines:
        return printed
    if matches(plain(shown.lines), plain(printed)):
        return shown.lines
    placed = aligned(shown.lines, printed)
    if placed is not None:
        return placed
    if shown.lines.count(GAP) > 1:
        # To be shortened by hand.
        return [GAP, *printed, GAP]
    first = shown.lines.index(GAP)
    last = len(shown.lines) - first - 1
    return [*printed[:first], GAP, *printed[len(printed) - last :]]


def aligned(lines, printed):
    """The printed lines that have the words of a page's, each run of them at the first place; None without them."""
    placed, after = [], 0
    for gap, group in groupby(lines, lambda line: line == GAP):
        run = list(group)
        if gap:
            placed += run
            continue
        wanted = [without_free(line) for line in run]
        last = len(printed) - len(run)
        starts = range(after, last + 1) if placed else [0]
        starts = [last] if run[-1] is lines[-1] and last >= after else starts
        for start in starts:
            lines_there = [without_free(line) for line in printed[start : start + len(run)]]
            pairs = zip(wanted, lines_there, strict=False)
            if len(lines_there) == len(run) and all(same_line(a, b, compare_numbers=False) for a, b in pairs):
                placed += [old if GAP in old else new for old, new in zip(run, printed[start:], strict=False)]
                after = start + len(run)
                break
        else:
            return None
    return placed


def check_page(page, folder, compare_numbers=True, only=None):
    """Run a page's console blocks in order; what differs. With MMM_WRITE_DOCS, write what they print instead.

    Args:
        compare_numbers: whether numbers count, or only words. only: the block that begins with this command.
    """
    text = page.read_text(encoding="utf-8")
    wrong, written, end = [], [], 0
    is_there = only is None
    for block in blocks(text):
        if block.language != "console" and (name := re.match(r"(?:#!.*\n)?# (\w+\.(?:py|yaml|sh))\n", block.text)):
            (folder / name[1]).write_text(block.text, encoding="utf-8")
        if block.language != "console":
            continue
        shown = commands_of(block.text)
        if only not in (None, shown[0].command):
            continue
        is_there = True
        results = run([command.command for command in shown], folder)
        differences = [
            difference(command, *result, compare_numbers) for command, result in zip(shown, results, strict=True)
        ]
        wrong += [f"{page.name}:{block.line}: {text}" for text in differences if text]
        lines = []
        for command, (printed, _) in zip(shown, results, strict=True):
            lines += [*f"$ {command.command}".splitlines(), *anew(command, printed)]
        written += [text[end : block.span[0]], "".join(f"{line}\n" for line in lines)]
        end = block.span[1]
    assert is_there, f"{page.name} has no block that begins with {only}"
    if os.environ.get(WRITE):
        page.write_text("".join([*written, text[end:]]), encoding="utf-8")
        return []
    return wrong
