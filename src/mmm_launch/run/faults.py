"""Looks up what a failed attempt has printed in the patterns of the machine: is a host to blame, or the program?"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mmm_launch.spec.hosts import host_key

# Whose fault a pattern stands for: the first word of each value of `Machine.faults`.
HOST = "host"
PROGRAM = "program"
PASSES = "passes"


class Finding(NamedTuple):
    """A line that a pattern fits.

    Attributes:
        whose: `HOST`, `PROGRAM` or `PASSES`.
        host: the host that the line is about; "": that is not known.
        text: name of the pattern, and the line.
    """

    whose: str
    host: str
    text: str


def look(faults: Mapping[str, str], text: str, hosts: Sequence[str], otherwise: str) -> list[Finding]:
    """Find the lines of a text that patterns fit.

    A line is about the host, or the host of the rank, that it names first. NCCL's lines begin with the host's name,
    those of PyTorch with ``[rank3]:``.

    Args:
        faults: the patterns, as in `Machine.faults`.
        hosts: name of the host of rank 0, 1, …
        otherwise: the host that a line is about if it names none.
    """
    by_word = {f"rank{rank}": name for rank, name in enumerate(hosts)}
    by_word |= {host_key(name): name for name in hosts}
    findings = []
    for line in text.splitlines():
        for name, fault in faults.items():
            whose, _, pattern = fault.partition(": ")
            if re.search(pattern, line):
                split = map(host_key, re.findall(r"[\w-]+", line))
                named = [by_word[word] for word in split if word in by_word]
                findings.append(Finding(whose, [*named, otherwise][0], f"{name}: {line.strip()}"))
    return findings
