"""How ranks find each other in a store that has outlived others: torchrun's, when it starts the ranks again."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from mmm.runtime.agreement import rendezvous
from mmm.runtime.ranks import Rank
from support.clock import PATIENCE


class Died(Exception):
    pass


class Dying:
    """A store whose user dies at its n-th call."""

    def __init__(self, store, calls):
        self.store, self.left = store, calls

    def __getattr__(self, name):
        self.left -= 1
        if self.left < 0:
            raise Died
        return getattr(self.store, name)


def ranks(count):
    return [Rank(rank, count, rank, count, "torchrun", "nowhere", 1) for rank in range(count)]


def new_store():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=PATIENCE))
    return store


def attempt(store, deaths):
    """An attempt in which rank r dies at its deaths[r]-th call of the store; the others wait for it until they end."""
    store.set_timeout(timedelta(seconds=0.1))
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(rendezvous, Dying(store, deaths.get(rank.rank, 99)), rank) for rank in ranks(3)]
        errors = [call.exception() for call in calls]
    store.set_timeout(timedelta(seconds=PATIENCE))
    return errors


def meet(store):
    with ThreadPoolExecutor() as pool:
        return list(pool.map(rendezvous, [store] * 3, ranks(3)))


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("calls", range(6))
def test_ranks_that_start_again_meet_whatever_the_dead_have_left(victim, calls):
    store = new_store()
    for _ in range(2):
        attempt(store, {victim: calls})
    assert len(set(meet(store))) == 1
    assert len(set(meet(store))) == 1
