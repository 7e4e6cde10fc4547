"""A home folder that cannot be read, as on a compute node where it is not mounted: nothing that looks there fails."""

import os
import subprocess
import sys

from support.clock import PATIENCE

# Root reads everything unless it gives that up.
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
LOOK = """
import os
from pathlib import Path
from mmm.data.cache import Refused, cache_folder, download_once
from mmm.data.images.datasets import load_images
from mmm.data.text.shakespeare import shakespeare
from mmm.errors import DataError
from mmm_launch.machines import find

assert not os.access(os.environ["HOME"], os.R_OK)
assert "aurora" in find.load(os.environ)
assert "Permission denied" in load_images("mnist").note
assert find.machine_here("cpu", None, 1, 1) is None
for ask, error in ((lambda: download_once(cache_folder() / "x", print), Refused), (shakespeare, DataError)):
    try:
        ask()
    except error as refused:
        assert "Permission denied" in str(refused), refused
    else:
        raise AssertionError(f"{ask} has found something")
"""


def test_a_home_folder_that_cannot_be_read(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0)
    command = [*(ORDINARY if os.geteuid() == 0 else []), sys.executable, "-c", LOOK]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MMM_"))}
    try:
        done = subprocess.run(
            command, env=environ | {"HOME": str(home)}, capture_output=True, text=True, timeout=PATIENCE
        )
    finally:
        home.chmod(0o700)
    assert done.returncode == 0, done.stderr
