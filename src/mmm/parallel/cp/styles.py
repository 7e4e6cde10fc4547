"""How a sequence is sharded over cp: which of the ways there are, and how many ranks share heads under usp."""

from __future__ import annotations

from dataclasses import replace

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import CP_STYLES, Layout, Techniques


def check_cp_style(style: str) -> None:
    """Raises ConfigError where there is no such way to shard a sequence."""
    if style not in CP_STYLES:
        raise ConfigError(f"{config_field('cp_style')} {style!r} is not one of {', '.join(CP_STYLES)}")


def check_context_parallel(techniques: Techniques, layout: Layout) -> None:
    """Whether ``cp_style`` and ``ulysses`` go together and with a layout; needs no process group.

    Raises:
        ConfigError: no such style, or ``ulysses`` with another than usp, or usp without it.
        LayoutError: it does not divide cp.
    """
    style, size, field = techniques.cp_style, techniques.ulysses, config_field("ulysses")
    check_cp_style(style)
    if style != "usp" and size is not None:
        raise ConfigError(
            f"{field} {size} with {config_field('cp_style')} {style}: it says how many ranks of cp share heads under "
            f"usp; leave it out, or use usp"
        )
    if style != "usp" or layout.cp == 1:
        return
    if size is None:
        raise ConfigError(
            f"{config_field('cp_style')} usp: give {field}, ranks of cp that share heads, a divisor of cp {layout.cp}"
        )
    if size < 1 or layout.cp % size:
        raise LayoutError(f"{field} {size} does not divide cp {layout.cp}: give one of {divisors_text(layout.cp)}")


def divisors_text(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def resolve_ulysses(techniques: Techniques, layout: Layout, n_heads: int, ranks_per_host: int | None) -> Techniques:
    """With ``ulysses`` of usp, where it is left open: the most ranks of cp that share a host and divide the heads.

    Args:
        n_heads: query heads of the full model. ranks_per_host: None where it is not known.

    Raises:
        ConfigError: it is not known, or hosts have different numbers of ranks.
    """
    if techniques.cp_style != "usp" or techniques.ulysses is not None or layout.cp == 1:
        return techniques
    if ranks_per_host is None or layout.ranks % ranks_per_host:
        raise ConfigError(
            f"{config_field('cp_style')} usp: nothing says which ranks of cp share a host: give "
            f"{config_field('ulysses')}, one of {divisors_text(layout.cp)}"
        )
    return replace(techniques, ulysses=host_ulysses(layout.cp, layout.tp, n_heads, ranks_per_host))


def host_ulysses(cp: int, tp: int, n_heads: int, ranks_per_host: int) -> int:
    """The most neighbours along cp that share a host and, with tp, divide the heads."""
    sizes = (n for n in range(1, cp + 1) if cp % n == 0)
    return max((n for n in sizes if ranks_per_host % (n * tp) == 0 and n_heads % (n * tp) == 0), default=1)
