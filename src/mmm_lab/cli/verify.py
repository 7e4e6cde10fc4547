"""``mmm verify``: does a parallel program compute what its model does on one device?"""

from __future__ import annotations

from mmm_verify.command import main as verify


def main(argv: list[str]) -> int:
    """The command of `mmm_verify`."""
    return verify(argv, "mmm verify")
