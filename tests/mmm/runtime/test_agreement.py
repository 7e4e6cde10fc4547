"""What the ranks differ in is found, said compactly, and every rank's error."""

import re
import time
from unittest.mock import patch

import pytest
from torch.distributed.distributed_c10d import _get_default_store

from mmm.errors import ConfigError, DeviceError, RecordError
from mmm.runtime import agreement
from mmm.runtime.agreement import agree, check_devices, differences, find_hosts


def test_equal_facts():
    assert differences([("a", {"torch": "2.8"})] * 3) is None
    # A rank that says nothing of a fact agrees with any value.
    assert differences([("a", {"torch": "2.8", "files": "1"}), ("a", {"torch": "2.8"})]) is None


def test_a_difference_names_values_ranks_and_hosts():
    facts = {"--lr": "0.1", "torch": "2.8", "--seed": "0"}
    by_rank = [("a", facts), ("a", facts | {"--lr": "0.3"}), ("b", facts | {"torch": "2.13"}), ("b", facts)]
    _, lr, version, _ = differences(by_rank).splitlines()
    assert lr == "  --lr: 0.1 on ranks 0, 2-3 (a, b); 0.3 on rank 1 (a)"
    assert version == "  torch: 2.8 on ranks 0-1, 3 (a, b); 2.13 on rank 2 (b)"


def test_a_message_of_thousands_of_ranks_stays_readable():
    by_rank = [(f"node{rank}", {f"--{name}": str(rank) for name in range(20)}) for rank in range(2400)]
    text = differences(by_rank)
    assert "--0: 0 on rank 0 (node0); 1 on rank 1 (node1)" in text
    assert len(text) < 2000


def meet(rank, differing, refusing):
    """What each rank raises, and whether rank 0's part was done; twice, as a program with two runs does."""
    done, outcome = [], []
    agreement.FIRST_WORD = 0.2

    def then():
        done.append(rank.rank)
        if refusing:
            raise RecordError("the folder is a file")

    for _ in range(2):
        facts = {"dtype": "bf16" if differing and rank.rank == 2 else "fp32"}
        begin = time.monotonic()
        try:
            agree(_get_default_store(), rank, facts, then)
            outcome.append(None)
        except (ConfigError, RecordError) as error:
            outcome.append((type(error).__name__, str(error), error.on_every_rank))
            # rank 0 has the word: the first that ends, ends all
            assert rank.is_main or time.monotonic() - begin > 0.2
    return outcome, done


def meet_on(rank, hosts, identities):
    """What this rank raises where rank r is on hosts[r] and has device identities[r]; and all hosts."""
    agreement.FIRST_WORD = 0.2
    with patch.object(agreement.socket, "gethostname", lambda: hosts[rank.rank]):
        try:
            check_devices(_get_default_store(), rank, identities[rank.rank])
            message = None
        except DeviceError as error:
            message = str(error), error.on_every_rank
        return message, find_hosts(_get_default_store(), rank)


@pytest.mark.parametrize(
    ("hosts", "identities", "message"),
    [
        ("aabb", ["GPU-1", "GPU-2", "GPU-3", "GPU-4"], None),
        # On another host.
        ("aabb", ["GPU-1", "GPU-2", "GPU-1", "GPU-2"], None),
        ("aabb", ["", "", "", ""], None),
        ("aabb", ["GPU-1", "GPU-2", "GPU-3", "GPU-3"], "ranks 2-3 on b are on one device: "),
        ("aaaa", ["GPU-1"] * 4, "ranks 0-3 on a are on one device: "),
        ("aaaa", ["GPU-1", "GPU-2"] * 2, r"ranks 0, 2 on a are on one device: "),
    ],
)
def test_ranks_on_one_device(run_on_ranks, hosts, identities, message):
    """NCCL would end in "Duplicate GPU detected", or hang."""
    for error, hosts_of_ranks in run_on_ranks(meet_on, 4, hosts, identities):
        assert hosts_of_ranks == [*hosts]
        if message is None:
            assert error is None
        else:
            text, on_every_rank = error
            assert re.match(message, text)
            assert on_every_rank


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_go_on(run_on_ranks, ranks):
    assert run_on_ranks(meet, ranks, False, False) == [
        ([None, None], [0, 0] if rank == 0 else []) for rank in range(ranks)
    ]


def test_a_difference_is_every_ranks_error(run_on_ranks):
    (outcome, done), *others = run_on_ranks(meet, 3, True, False)
    name, text, everywhere = outcome[0]
    # Nothing is prepared for a run that is refused.
    assert (name, everywhere, done) == ("ConfigError", True, [])
    assert "dtype: fp32 on ranks 0-1" in text
    for other in others:
        assert other == (outcome, [])


def test_what_rank_0_cannot_do_is_every_ranks_error(run_on_ranks):
    (outcome, _), *others = run_on_ranks(meet, 3, False, True)
    assert outcome == [("RecordError", "the folder is a file", True)] * 2
    for other in others:
        assert other == (outcome, [])
