"""A pytest plugin for tests on ranks: real processes of this host, none of which is left behind.

Installed with the package, it needs no conftest. A test with the mark ``ranks`` runs on so many forked ranks, each
inside their process group (gloo, or the accelerators' backend with ``--ranks-device``)::

    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.ranks(4)
    def test_total():
        numbers = torch.ones(3) * dist.get_rank()
        dist.all_reduce(numbers)
        assert numbers.tolist() == [6.0] * 3

    @pytest.mark.ranks("dp2,tp2")                  # four ranks, and the mesh that they stand on
    def test_mesh(mesh, tmp_path):
        assert mesh["tp"].size() == 2

    def test_that_it_is_right(verify):             # docs/verify.md
        verify(make_model, parallelize, make_batch, mesh="dp2,tp2")

Ranks are forked where the test begins, so fixtures of every scope, closures and a patched environment are there as
they are; what ranks change in them is lost with them. What each prints is shown with its rank. A rank that fails, or
dies, fails that test alone. Ranks that have not ended after ``--ranks-timeout`` seconds (10) fail it too, with where
each of them was, and which one the others waited for.

`run_on_ranks` is a fixture that runs a function on ranks that stay, and gives what each returned; `fork_ranks` does it
without pytest, on new ranks (`mmm_verify.ranks`).
"""

from mmm_verify.ranks import RanksFailed, fork_ranks, free_port

__all__ = ["RanksFailed", "fork_ranks", "free_port"]
