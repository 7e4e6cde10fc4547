"""`launch` in a folder of its own, with ranks forked and spawned."""

import pytest


@pytest.fixture(params=["prefork", "spawn"])
def launch_options(request):
    """The options that start ranks by fork, and those that start them as new processes."""
    return [] if request.param == "prefork" else ["--no-prefork"]


@pytest.fixture
def pbs(tmp_path):
    """A PBS job's environment with these lines in its node file."""

    def make(*lines, job="123.cluster", **more):
        path = tmp_path / "nodes"
        path.write_text("".join(line + "\n" for line in lines))
        return {"PBS_JOBID": job, "PBS_NODEFILE": str(path), **more}

    return make
