"""What the ranks agree on while they meet, before any communication between devices.

Each rank leaves what it knows in the store by which the ranks have met. Rank 0 reads it, and tells all ranks what
follows: either every rank continues, or every rank raises the same error. `agree` compares what has to be equal, and
does what only rank 0 does (such as preparing the run's folder); `check_devices` finds ranks that share a device;
`find_hosts` tells which rank is on which host; `rendezvous` meets the living ranks where dead ones have left their
entries in the store.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import Store

from mmm import errors
from mmm.errors import ConfigError, DeviceError, UserError
from mmm.runtime.ranks import Rank

# Ranks whose facts are read in one request to the store.
CHUNK = 256

# Seconds that rank 0, which holds the store, waits until the others have heard of an error.
HEARD = 10.0

# Seconds by which rank 0 ends first, because it prints the error: Open MPI kills all ranks when the first has ended.
FIRST_WORD = 1.0

# How many values of a fact, groups of ranks, and hosts a message names at most, of each.
SHOWN = 4

# How many facts a message names at most.
FACTS = 8

ADVICE = (
    "Start every rank with one command line, in one environment, on the same data; --device and --dtype decide for all."
)


def rendezvous(store: Store, rank: Rank) -> int:
    """Return the number of the rendezvous at which all ranks are now, from 1 on. A collective.

    torchrun's store stays when it starts the ranks again, with all that the dead ones have left in it: how far each
    had come, and where it listened. So each attempt to meet has a number. Rank 0 begins a new rendezvous; the others
    join once it has begun. One that not all ranks have reached is over when the next begins; one that was held is not
    waited for again.
    """

    def key(meeting: int, event: str) -> str:
        return f"mmm/meetings/{meeting}/{event}"

    if rank.is_main:
        meeting = store.add("mmm/meetings", 1)
        before = meeting - 1
        if before > 0 and not store.check([key(before, "end")]):
            store.set(key(before, "end"), "over")
            # That rendezvous's rank 0 may have died before it said so.
            store.set(key(before, "begin"), "")
        store.set(key(meeting, "begin"), "")
        _others(store, f"mmm/meetings/{meeting}", rank.world_size)
        store.set(key(meeting, "end"), "held")
        return meeting
    meeting = store.add("mmm/meetings", 0)
    if meeting == 0 or store.check([key(meeting, "end")]):
        meeting += 1
    # `get` waits until the key is there.
    while True:
        store.get(key(meeting, "begin"))
        store.set(key(meeting, str(rank.rank)), json.dumps(None))
        if store.get(key(meeting, "end")) == b"held":
            return meeting
        meeting += 1


def unique_key(store: Store, rank: Rank, purpose: str) -> str:
    """Return a prefix of keys that has not been used before, the same on every rank.

    Every rank counts its own calls for a purpose. The counts agree, because a collective follows each call.
    """
    count = store.add(f"mmm/{purpose}/of/{rank.rank}", 1)
    return f"mmm/{purpose}/{count}"


def agree(
    store: Store,
    rank: Rank,
    facts: Mapping[str, str],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Refuse a run whose ranks differ, on every rank. A collective: every rank calls it as often as the others.

    Args:
        store: the store that all ranks share.
        rank: this process's place.
        facts: name → value of what has to be equal. A rank may leave out a fact: it then agrees with any value.
        then: called on rank 0 once all agree. If it raises a `UserError`, every rank raises it.

    Raises:
        ConfigError: facts differ. The message names them, their values, and the ranks and hosts that have each.
        UserError: `then` has raised it on rank 0.
    """

    def decide(by_rank: list[Any]) -> str:
        text = differences(by_rank)
        if text:
            raise ConfigError(text)
        then()
        return ""

    decide_on_rank0(store, rank, (socket.gethostname(), dict(facts)), decide)


def check_devices(store: Store, rank: Rank, identity: str) -> None:
    """Refuse a run in which two ranks of a host have one device, on every rank. A collective.

    Args:
        store: the store that all ranks share.
        rank: this process's place.
        identity: text that tells this rank's device from all others of its host; "" if unknown.

    Raises:
        DeviceError: ranks share a device. The message names them and their host.
    """

    def decide(by_rank: list[Any]) -> str:
        users: dict[tuple[str, str], list[int]] = {}
        for user, (host, device) in enumerate(by_rank):
            users.setdefault((host, device), []).append(user)
        for (host, device), ranks in users.items():
            if device and len(ranks) > 1:
                raise DeviceError(
                    f"{name_ranks(ranks)} on {host} are on one device: start at most one rank a device (launch -n), "
                    f"show each rank its own (srun --gpus-per-task=1), or use --device cpu"
                )
        return ""

    decide_on_rank0(store, rank, (socket.gethostname(), identity), decide)


def find_hosts(store: Store, rank: Rank) -> list[str]:
    """Return the host name of every rank, by rank. A collective."""
    text = decide_on_rank0(store, rank, socket.gethostname(), json.dumps)
    return json.loads(text)


def decide_on_rank0(
    store: Store,
    rank: Rank,
    own: Any,
    decide: Callable[[list[Any]], str],
) -> str:
    """Let rank 0 decide from what all ranks have, and return its decision on every rank. A collective.

    Args:
        store: the store that all ranks share.
        rank: this process's place.
        own: what this rank has; it is sent as JSON.
        decide: function of what all ranks have, by rank, which returns the decision as text; called on rank 0.

    Raises:
        UserError: `decide` has raised it. Every rank raises the same.
    """
    prefix = unique_key(store, rank, "agreement")
    if not rank.is_main:
        store.set(f"{prefix}/{rank.rank}", json.dumps(own))
        verdict = store.get(f"{prefix}/verdict")
        kind, text = json.loads(verdict)
        if kind:
            store.add(f"{prefix}/heard", 1)
            time.sleep(FIRST_WORD)
            error_class = getattr(errors, kind, UserError)
            raise error_class(text, on_every_rank=True)
        return text
    try:
        text = decide([own, *_others(store, prefix, rank.world_size)])
    except UserError as error:
        if rank.world_size > 1:
            fields = [type(error).__name__, str(error)]
            store.set(f"{prefix}/verdict", json.dumps(fields))
            # Rank 0 holds the store: if it ended now, the others could not read the verdict.
            _wait_until_heard(store, prefix, rank.world_size - 1)
        error.on_every_rank = True
        raise
    if rank.world_size > 1:
        store.set(f"{prefix}/verdict", json.dumps(["", text]))
    return text


def _others(store: Store, prefix: str, world_size: int) -> list[Any]:
    """Read what ranks 1, 2, … have left under a prefix, and wait for what is not there yet."""
    keys = [f"{prefix}/{rank}" for rank in range(1, world_size)]
    values = []
    for start in range(0, len(keys), CHUNK):
        for text in store.multi_get(keys[start : start + CHUNK]):
            values.append(json.loads(text))
    return values


def _wait_until_heard(store: Store, prefix: str, others: int) -> None:
    deadline = time.monotonic() + HEARD
    while store.add(f"{prefix}/heard", 0) < others and time.monotonic() < deadline:
        time.sleep(0.01)


def differences(by_rank: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """Describe the facts in which the ranks differ; None if they are all equal.

    Args:
        by_rank: host, and name → value of the facts, of every rank. A rank may leave out a fact.
    """
    # Fact → value → the ranks that have it.
    values: dict[str, dict[str, list[int]]] = {}
    for rank, (_, facts) in enumerate(by_rank):
        for name, value in facts.items():
            values.setdefault(name, {}).setdefault(value, []).append(rank)
    different = [name for name, ranks in values.items() if len(ranks) > 1]
    if not different:
        return None
    lines = [f"the ranks differ in what has to be the same on all {len(by_rank)} of them:"]
    for name in different[:FACTS]:
        texts = []
        for value, ranks in list(values[name].items())[:SHOWN]:
            hosts = name_hosts([by_rank[rank][0] for rank in ranks])
            texts.append(f"{value} on {name_ranks(ranks)} ({hosts})")
        lines.append(f"  {name}: {'; '.join(texts)}")
    lines.append(ADVICE)
    return "\n".join(lines)


def name_ranks(ranks: Sequence[int]) -> str:
    """Write ascending ranks as ``rank 3`` or ``ranks 0-5, 8``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    # Runs of consecutive ranks, each as its first and last: [first], or [first, last].
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs[:SHOWN])
    if len(runs) > SHOWN:
        text += f", … ({len(ranks)} in all)"
    return f"ranks {text}"


def name_hosts(hosts: Sequence[str]) -> str:
    """Write the names of hosts, each once; only the first ones where there are many."""
    names = list(dict.fromkeys(hosts))
    text = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        text += f", … ({len(names)} hosts)"
    return text
