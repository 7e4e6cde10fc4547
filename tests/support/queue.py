"""A scheduler that only takes jobs: `qsub`, `qdel`, `sbatch`, `scancel` and `flux` write down what they are given."""

import json
import os
import sys

STAND_IN = """#!{python}
import json, os, sys
folder = {folder!r}
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if os.path.exists(os.path.join(folder, "refuse")):
    sys.exit(name + ": error: invalid account")
calls = os.path.join(folder, "calls")
number = sum(1 for line in open(calls)) + 1 if os.path.exists(calls) else 1
if words[0] == "getattr":
    sys.exit(print("of " + words[1]))
script = sys.stdin.read() if name in ("qsub", "sbatch") or words[0] == "batch" else ""
inside = {{key: os.environ[key] for key in os.environ if key.startswith("SLURM_") or key == "FLUX_URI"}}
with open(calls, "a") as file:
    print(json.dumps([name, words, script, inside]), file=file)
if script:
    print(str(number) + {{"qsub": ".pbs", "sbatch": ";mini", "flux": ""}}[name])
"""
COMMANDS = {"pbs": ("qsub", "qdel"), "slurm": ("sbatch", "scancel"), "flux": ("flux",)}


class StandIn:
    """Its commands stand first on PATH."""

    def __init__(self, folder, scheduler, monkeypatch):
        self.folder, self.scheduler = folder, scheduler
        folder.mkdir()
        for name in COMMANDS[scheduler]:
            (folder / name).write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def refuse(self):
        (self.folder / "refuse").touch()

    def calls(self):
        """Of each call: the command, its words, the script, Slurm's variables and FLUX_URI."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
