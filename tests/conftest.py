"""Ranks are real processes, from a pool that is forked once, before this process computes anything."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["mmm.testing.plugin"]
