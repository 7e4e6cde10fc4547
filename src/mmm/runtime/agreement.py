"""What the ranks decide while they meet, and before any communication between devices.

Each rank leaves what it knows in the store by which the ranks have found each other. Rank 0 reads it, and tells all
what follows: either every rank goes on, or every rank raises the same error. `agree` compares what has to be equal, and
does what only rank 0 does (such as to prepare the run's folder); `check_devices` finds ranks on one device;
`find_hosts` says who is on which host; `rendezvous` finds the others where dead ranks have left their own.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mmm import errors
from mmm.errors import ConfigError, DeviceError, UserError
from mmm.runtime.ranks import Rank

CHUNK = 256  # ranks whose facts are read at once
HEARD = 10.0  # s that rank 0, which holds the store, waits for the others to hear of an error
FIRST_WORD = 1.0  # s by which rank 0, which says the error, is ahead: Open MPI kills all when the first rank has ended
SHOWN = 4  # values of a fact, groups of ranks, and hosts, that are named each
FACTS = 8  # facts that are named


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


def rendezvous(store: Store, rank: Rank) -> int:
    """The number of the rendezvous that all ranks are at now, from 1 on. A collective.

    torchrun's store stays when it starts the ranks again, with all that the dead have left in it: how far each had
    come, and where it listened. Rank 0 begins a new one; the others come once it has begun. One at which not all have
    come is over when the next begins; one that has been held is not waited for again.
    """

    def key(number: int, what: str) -> str:
        return f"mmm/meetings/{number}/{what}"

    if rank.is_main:
        number = store.add("mmm/meetings", 1)
        if number > 1 and not store.check([key(number - 1, "end")]):
            store.set(key(number - 1, "end"), "over")
            store.set(key(number - 1, "begin"), "")  # its rank 0 may have died before
        store.set(key(number, "begin"), "")
        _others(store, f"mmm/meetings/{number}", rank.world_size)
        store.set(key(number, "end"), "held")
        return number
    number = store.add("mmm/meetings", 0)
    if number == 0 or store.check([key(number, "end")]):
        number += 1
    while True:
        store.get(key(number, "begin"))
        store.set(key(number, str(rank.rank)), json.dumps(None))
        if store.get(key(number, "end")) == b"held":
            return number
        number += 1


def unique_key(store: Store, rank: Rank, what: str) -> str:
    """Where in the store the ranks leave what belongs to their next `what`: no key there has been used before.

    Every rank counts its own. They agree, because what is counted is a collective.
    """
    return f"mmm/{what}/{store.add(f'mmm/{what}/of/{rank.rank}', 1)}"


def agree(
    store: Store,
    rank: Rank,
    facts: Mapping[str, str],
    advice: Mapping[str, str] | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Refuse a run whose ranks differ, on every rank. A collective; every rank calls it as often as the others.

    Args:
        facts: name and value. A rank may leave out a fact: it then agrees with any value.
        advice: what to do where a fact differs, by name; ``""`` for those that have none. Rank 0's counts.
        then: called on rank 0 once all agree; its `UserError` is every rank's.

    Raises:
        ConfigError: facts differ: which, how, on which ranks and hosts.
        UserError: what `then` has raised on rank 0.
    """

    def decide(by_rank: list[Any]) -> str:
        if text := differences(by_rank, advice or {}):
            raise ConfigError(text)
        then()
        return ""

    decide_on_rank0(store, rank, (socket.gethostname(), dict(facts)), decide)


def check_devices(store: Store, rank: Rank, identity: str) -> None:
    """Refuse a run in which two ranks of a host have one device, on every rank. A collective.

    Args:
        identity: what tells this rank's device from all others of its host; "" where that is not known.

    Raises:
        DeviceError: which ranks, where.
    """

    def decide(by_rank: list[Any]) -> str:
        ranks: dict[tuple[str, str], list[int]] = {}
        for number, (host, device) in enumerate(by_rank):
            ranks.setdefault((host, device), []).append(number)
        shared = [(host, where) for (host, device), where in ranks.items() if device and len(where) > 1]
        if shared:
            host, where = shared[0]
            raise DeviceError(
                f"{name_ranks(where)} on {host} are on one device: start at most one rank a device (launch -n), show "
                f"each rank its own (srun --gpus-per-task=1), or use --device cpu"
            )
        return ""

    decide_on_rank0(store, rank, (socket.gethostname(), identity), decide)


def find_hosts(store: Store, rank: Rank) -> list[str]:
    """The host of every rank, by rank. A collective."""
    return json.loads(decide_on_rank0(store, rank, socket.gethostname(), json.dumps))


def decide_on_rank0(store: Store, rank: Rank, own: Any, decide: Callable[[list[Any]], str]) -> str:
    """What rank 0 decides on what all ranks have, on every rank. A collective, in the same order on all.

    Args:
        own: this rank's part, as JSON has it. decide: from all ranks' parts, by rank; called on rank 0.

    Raises:
        UserError: `decide` has raised it.
    """
    where = unique_key(store, rank, "agreement")
    if not rank.is_main:
        store.set(f"{where}/{rank.rank}", json.dumps(own))
        kind, text = json.loads(store.get(f"{where}/verdict"))
        if kind:
            store.add(f"{where}/heard", 1)
            time.sleep(FIRST_WORD)
            raise getattr(errors, kind, UserError)(text, on_every_rank=True)
        return text
    try:
        text = decide([own, *_others(store, where, rank.world_size)])
    except UserError as error:
        if rank.world_size > 1:
            store.set(f"{where}/verdict", json.dumps([type(error).__name__, str(error)]))
            _wait_until_heard(store, where, rank.world_size - 1)
        error.on_every_rank = True
        raise
    if rank.world_size > 1:
        store.set(f"{where}/verdict", json.dumps(["", text]))
    return text


def _others(store: Store, where: str, world_size: int) -> list[Any]:
    """The parts of ranks 1, 2, …, as they come."""
    keys = [f"{where}/{rank}" for rank in range(1, world_size)]
    chunks = [keys[start : start + CHUNK] for start in range(0, len(keys), CHUNK)]
    return [json.loads(text) for chunk in chunks for text in store.multi_get(chunk)]


def _wait_until_heard(store: Store, where: str, others: int) -> None:
    deadline = time.monotonic() + HEARD
    while store.add(f"{where}/heard", 0) < others and time.monotonic() < deadline:
        time.sleep(0.01)


def differences(by_rank: Sequence[tuple[str, Mapping[str, str]]], advice: Mapping[str, str]) -> str | None:
    """What is not equal, in words; None if everything is.

    Args:
        by_rank: of every rank, by rank: its host, and its facts by name. advice: as in `agree`.
    """
    values: dict[str, dict[str, list[int]]] = {}
    for rank, (_, facts) in enumerate(by_rank):
        for name, value in facts.items():
            values.setdefault(name, {}).setdefault(value, []).append(rank)
    different = {name: ranks for name, ranks in values.items() if len(ranks) > 1}
    if not different:
        return None
    hosts = [host for host, _ in by_rank]
    lines = [f"  {name}: {_values(ranks, hosts)}" for name, ranks in list(different.items())[:FACTS]]
    if len(different) > FACTS:
        lines.append(f"  and {len(different) - FACTS} more: {', '.join(list(different)[FACTS:])}")
    help_ = dict.fromkeys(advice.get(name, advice.get("", "")) for name in different)
    lines += [text for text in help_ if text]
    return "\n".join([f"the ranks differ in what has to be the same on all {len(by_rank)} of them:", *lines])


def _values(ranks: Mapping[str, list[int]], hosts: Sequence[str]) -> str:
    """Each value, and where it is; the common ones first."""
    common = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1][0]))
    shown = [
        f"{value} on {name_ranks(where)} ({name_hosts([hosts[rank] for rank in where])})"
        for value, where in common[:SHOWN]
    ]
    rest = [rank for _, where in common[SHOWN:] for rank in where]
    if rest:
        shown.append(f"{len(common) - SHOWN} other values on {name_ranks(sorted(rest))}")
    return "; ".join(shown)


def name_ranks(ranks: Sequence[int]) -> str:
    """Such as ``rank 3`` or ``ranks 0-5, 8``, of ascending numbers."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs[:SHOWN])
    return f"ranks {text}" + (f", … ({len(ranks)} in all)" if len(runs) > SHOWN else "")


def name_hosts(hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts))
    return ", ".join(names[:SHOWN]) + (f", … ({len(names)} hosts)" if len(names) > SHOWN else "")
