"""A pytest plugin for tests on ranks, which are real processes of this host. None of them is left behind.

It is installed with the package and needs no conftest. A test with the mark ``ranks`` runs on that many forked ranks,
each in their process group (gloo, or the accelerator's backend with ``--ranks-device``)::

    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.ranks(4)
    def test_total():
        numbers = torch.ones(3) * dist.get_rank()
        dist.all_reduce(numbers)
        assert numbers.tolist() == [6.0] * 3

    @pytest.mark.ranks("dp2,tp2")                  # four ranks, and their mesh
    def test_mesh(mesh, tmp_path):
        assert mesh["tp"].size() == 2

    def test_that_it_is_right(verify):             # docs/verify-project.md
        verify(make_model, parallelize, make_batch, mesh="dp2,tp2")

Ranks are forked when the test begins: they have fixtures of every scope, closures and a patched environment. What
ranks change in them is lost when the test ends. What each rank prints is shown with its rank. A rank that fails or dies
fails only that test. Ranks that have not ended after ``--ranks-timeout`` seconds (10) fail it too; the message says
where each of them was, and which rank the others waited for.

`run_on_ranks` is a fixture that runs a function on ranks that stay, and returns each rank's result; `fork_ranks` does
so without pytest, on new ranks (`mmm_verify.ranks`).
"""

from mmm_verify.ranks import RanksFailed, fork_ranks, free_port

__all__ = ["RanksFailed", "fork_ranks", "free_port"]
