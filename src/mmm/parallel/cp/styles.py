"""How a sequence is sharded over cp: which of the styles, and how many ranks share heads under usp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import CP_STYLES, Layout, Techniques


def check_cp_style(style: str, choices: Sequence[str] = CP_STYLES) -> None:
    """Raises ConfigError where a style is not one of the choices."""
    if style not in choices:
        raise ConfigError(f"{config_field('cp_style')} {style!r} is not one of {', '.join(choices)}")


def check_context_parallel(techniques: Techniques, layout: Layout) -> None:
    """Check that ``cp_style`` and ``ulysses`` go together and with a layout. Needs no process group.

    Raises:
        ConfigError: there is no such style; or ``ulysses`` is given for another style than usp, or usp without it.
        LayoutError: ``ulysses`` does not divide cp.
    """
    style = techniques.cp_style
    ulysses = techniques.ulysses
    cp = layout.cp
    style_field = config_field("cp_style")
    field = config_field("ulysses")
    check_cp_style(style)
    if style != "usp" and ulysses is not None:
        raise ConfigError(
            f"{field} {ulysses} with {style_field} {style}: it says how many ranks of cp share heads under usp; leave "
            f"it out, or use usp"
        )
    if style != "usp" or cp == 1:
        return
    if ulysses is None:
        raise ConfigError(f"{style_field} usp: give {field}, ranks of cp that share heads, a divisor of cp {cp}")
    if ulysses < 1 or cp % ulysses:
        choices = _divisors_text(cp)
        raise LayoutError(f"{field} {ulysses} does not divide cp {cp}: give one of {choices}")


def splits_space(layout: Layout, techniques: Techniques) -> bool:
    """Whether cp splits the rows of fields."""
    return layout.cp > 1 and techniques.cp_style == "space"


def divisors(n: int) -> list[int]:
    """All divisors of n, in ascending order."""
    # Every divisor above the square root has a partner below it.
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _divisors_text(n: int) -> str:
    """The divisors of n, for a message."""
    return ", ".join(map(str, divisors(n)))


def resolve_ulysses(
    techniques: Techniques,
    layout: Layout,
    n_heads: int,
    ranks_per_host: int | None,
) -> Techniques:
    """Fill in ``ulysses`` for usp where it is left open: the most ranks of cp that share a host and divide the heads.

    Args:
        n_heads: number of query heads of the full model.
        ranks_per_host: number of ranks on each host; None where it is not known.

    Raises:
        ConfigError: the number of ranks on a host is not known, or differs between hosts.
    """
    if techniques.cp_style != "usp" or techniques.ulysses is not None or layout.cp == 1:
        return techniques
    # Hosts with different numbers of ranks do not divide the ranks.
    if ranks_per_host is None or layout.ranks % ranks_per_host:
        style_field = config_field("cp_style")
        field = config_field("ulysses")
        choices = _divisors_text(layout.cp)
        raise ConfigError(
            f"{style_field} usp: nothing says which ranks of cp share a host: give {field}, one of {choices}"
        )
    ulysses = host_ulysses(layout.cp, layout.tp, n_heads, ranks_per_host)
    return replace(techniques, ulysses=ulysses)


def host_ulysses(
    cp: int,
    tp: int,
    n_heads: int,
    ranks_per_host: int,
) -> int:
    """The most neighbours along cp that share a host and, together with tp, divide the heads."""
    largest = 1
    for size in divisors(cp):
        # tp is the innermost axis: `size` neighbours on cp are size · tp consecutive ranks.
        ranks = size * tp
        share_a_host = ranks_per_host % ranks == 0
        if share_a_host and n_heads % ranks == 0:
            largest = size
    return largest
