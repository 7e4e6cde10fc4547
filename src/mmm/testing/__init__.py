"""A pytest plugin that runs functions on forked ranks: real processes of this host; none is left behind.

A model's own tests use the pytest plugin. Its fixture runs a function on ranks 0 … n - 1 inside a process group of
theirs, and returns what each rank returned::

    # tests/conftest.py
    pytest_plugins = ["mmm.testing.plugin"]

    # tests/test_model.py
    import torch
    import torch.distributed as dist

    def total(rank, factor):                       # a function of a module: ranks find it by its name
        numbers = torch.full((3,), float(factor * rank.rank))
        dist.all_reduce(numbers)
        return numbers                             # by value, to the test

    def test_total(run_on_ranks):
        for numbers in run_on_ranks(total, 4, 10, timeout=60):
            assert numbers.tolist() == [60.0] * 3

`fork_ranks` does the same without pytest, on new processes each time (`mmm.processes`).
"""

from mmm.processes import RanksFailed, fork_ranks, free_port

__all__ = ["RanksFailed", "fork_ranks", "free_port"]
