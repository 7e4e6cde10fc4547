"""Numbers of ranks, host after host: to share them out, and in what form they can be asked for."""

from collections.abc import Sequence


def spread(total: int, limits: Sequence[int]) -> list[int]:
    """`total` ranks over hosts, as evenly as the limits of the hosts allow, the first hosts filled first.

    The sum of the limits has to be at least `total`.
    """
    most = -(-total // len(limits))
    while sum(min(most, limit) for limit in limits) < total:
        most += 1
    counts: list[int] = []
    for limit in limits:
        counts.append(min(most, limit, total - sum(counts)))
    return counts


def is_even(counts: Sequence[int]) -> bool:
    """Whether all hosts have the same number."""
    return len(set(counts)) == 1


def fills_host_after_host(counts: Sequence[int]) -> bool:
    """Whether one number a host says it all: each host is filled with so many before the next, the last with the rest.

    So hydra and PALS read -ppn; srun shares the ranks evenly.
    """
    return set(counts[:-1]) <= {counts[0]} and counts[-1] <= counts[0]


def in_words(counts: Sequence[int], shown: int) -> str:
    """`4 a host`; where they differ, the numbers of the first `shown` hosts."""
    if is_even(counts):
        return f"{counts[0]} a host"
    some = " ".join(map(str, counts[:shown])) + (" …" if len(counts) > shown else "")
    return f"on these hosts {some}"
