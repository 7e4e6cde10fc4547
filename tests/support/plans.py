"""What launch would start, from an environment made by hand."""

from mmm_launch.program.target import Target
from mmm_launch.spec import plan as planning
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.options import LaunchOptions
from mmm_launch.spec.table import shown

TARGET = Target("module", "train", ("--lr", "1"))
ENTRY = "python3 -m mmm_launch.host.agent -m train --lr 1"
HYDRA = "HYDRA build details:\n    Version:                                 4.0.2\n"
OPENMPI = "mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
PALS = "PALS version 1.3.4"
NO_GPU = Accelerators(None, 0, "torch is built for CPU")


def plan(environ, version=HYDRA, found=NO_GPU, **options):
    return planning.plan(TARGET, LaunchOptions(**options), environ=environ, version=version, found=found, build="cpu")


def line(made):
    return " ".join(shown(made.command))
