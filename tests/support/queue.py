"""A scheduler that only takes jobs: `qsub`, `sbatch` and `flux` write down what they are given."""

import json
import os
import sys

STAND_IN = """#!{python}
import json, os, sys
folder = {folder!r}
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
calls = os.path.join(folder, "calls")
number = sum(1 for line in open(calls)) + 1 if os.path.exists(calls) else 1
limit = os.path.join(folder, "limit")
if os.path.exists(limit) and number > int(open(limit).read()):
    sys.exit(name + ": error: invalid account")
inside = {{key: os.environ[key] for key in os.environ if key.startswith("SLURM_")}}
with open(calls, "a") as file:
    print(json.dumps([name, words, sys.stdin.read(), inside]), file=file)
print(str(number) + {{"qsub": ".pbs", "sbatch": ";mini", "flux": ""}}[name])
"""
# How each scheduler is given a job.
COMMANDS = {"pbs": "qsub", "slurm": "sbatch", "flux": "flux"}


class StandIn:
    """Its command stands first on PATH."""

    def __init__(self, folder, scheduler, monkeypatch):
        self.folder = folder
        folder.mkdir()
        command = folder / COMMANDS[scheduler]
        command.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def refuse(self, after=0):
        """Refuse every job after so many."""
        (self.folder / "limit").write_text(str(after))

    def calls(self):
        """Of each call: the command, its words, the script, and Slurm's variables."""
        path = self.folder / "calls"
        if path.exists():
            return [json.loads(line) for line in path.read_text().splitlines()]
        return []
