"""Real MPIs, a real Slurm of two nodes, and two hosts made of network namespaces, all on this machine, as root.

A tool that is missing is a skip that can be seen, or a failure where MMM_CLUSTER_TESTS=required is set.
"""

import os
import shutil

import pytest

from support.clusters import Mpi, Namespaces, Slurm

STRICT = os.environ.get("MMM_CLUSTER_TESTS") == "required"


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/cluster" in str(item.path):
            item.add_marker(pytest.mark.cluster)


def need(*programs, root=False):
    missing = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    missing += ["root's rights"] if root and os.geteuid() != 0 else []
    if missing:
        (pytest.fail if STRICT else pytest.skip)(f"missing for this test: {', '.join(missing)}")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    need("slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "munged", "mungekey", root=True)
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture
def two_hosts(tmp_path):
    need("ip", "unshare", "mpiexec.mpich", "mpirun.openmpi", "setsid", root=True)
    made = Namespaces(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request):
    """Four ranks on this host, by one of two MPIs."""
    made = Mpi(request.param)
    need(made.mpiexec)
    return made


@pytest.fixture
def need_mpi():
    return lambda mpi: need(mpi.mpiexec)
