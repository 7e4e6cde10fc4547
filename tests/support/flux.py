"""A stand-in for `flux`, inside a job of this host: it answers what launch asks, and starts tasks as `flux run` does.

What it prints and sets is that of flux-core's manual: flux-environment(7), flux-run(1).
"""

import json
import os
import sys

STAND_IN = """#!{python}
import json, os, subprocess, sys
folder, answers = {folder!r}, {answers!r}
words = sys.argv[1:]
with open(os.path.join(folder, "calls"), "a") as file:
    print(json.dumps(words), file=file)
if words[0] == "run":
    count = words[words.index("-n") + 1]
    command = words[words.index("gpu-affinity=off") + 1 :]
    tasks = []
    for rank in range(int(count)):
        task = dict(FLUX_TASK_RANK=str(rank), FLUX_JOB_SIZE=count, FLUX_TASK_LOCAL_ID="0", FLUX_JOB_NNODES=count)
        pmi = dict(PMI_RANK=str(rank), PMI_SIZE=count, FLUX_JOB_ID="f1")
        tasks.append(subprocess.Popen(command, env=dict(os.environ, **task, **pmi)))
    sys.exit(max(task.wait() for task in tasks))
answer = answers.get(" ".join(words))
if answer is None:
    sys.exit("flux: unknown: " + " ".join(words))
print(answer)
"""


class Flux:
    """The stand-in in a folder, for PATH.

    Args:
        answers: what it prints, by the words that it is called with.
    """

    def __init__(self, folder, answers):
        self.folder = folder
        folder.mkdir()
        path = folder / "flux"
        path.write_text(STAND_IN.format(python=sys.executable, folder=str(folder), answers=answers))
        path.chmod(0o755)
        self.environ = {"PATH": f"{folder}:{os.environ['PATH']}", "FLUX_URI": "local:///tmp/flux-a/local-0"}

    def calls(self):
        """The words of each call."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


def job(folder, hostlist, gpus=("0",)):
    """The stand-in for a job on these hosts; `gpus` are the lines of `flux resource list`."""
    return Flux(folder, {"getattr hostlist": hostlist, "resource list -n -o {ngpus}": "\n".join(gpus)})
