"""Flags that have an effect only beside others: which, as data, and one check for all of them.

A class of options has a table ``NEEDS``, flag → `Need`. A flag in it has None for its default, so that it is known
whether it was given; what None stands for is decided where the flag is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmm.errors import ConfigError
from mmm.parallel.mesh import Layout


@dataclass(frozen=True)
class Need:
    """What a flag needs.

    Attributes:
        met: (options, fitted layout) → whether it is there.
        without: the flag that is missing, or differs. why: what is so without it. give: what to give for it.
    """

    met: Callable[[Any, Layout], bool]
    without: str
    why: str
    give: str


PIPELINE = Need(lambda options, layout: layout.pp > 1, "--pp", "there is one stage, the model", "--pp 2")
CUT_SEQUENCE = Need(lambda options, layout: layout.cp > 1, "--cp", "no sequence is cut", "--cp 2")
EXPERTS = Need(lambda options, layout: options.n_experts > 0, "--n_experts", "there are no experts", "--n_experts 8")


def check_needs(options: Any, layout: Layout) -> None:
    """Raises ConfigError for the first flag that was given, and has no effect."""
    for owner in reversed(type(options).__mro__):
        for flag, need in vars(owner).get("NEEDS", {}).items():
            value = getattr(options, flag)
            if value is not None and not need.met(options, layout):
                raise ConfigError(
                    f"--{flag} {value} without {need.without}: {need.why}; leave --{flag} out, or give {need.give}"
                )
