"""Start-up times from the logs of Megatron-DeepSpeed's job scripts at ALCF.

The path says of which model on how many ranks a log is; a line says when the job began, a later one the first step::

    outputs/gpt_actCkpt_GPT1T_4L_z1_seqlen2048_…/logs/user-x3004c0s13b0n0-nhosts4-ngpu16-2023-11-02-183323.log
                        └model─┘                                                └ranks─┘
    Job started at: 2023-11-02-183323 on x3004c0s13b0n0
    [2023-11-02 18:34:13,122] [INFO] [logging.py:96:log_dist] [Rank 0] step=0, skipped=0, …
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mmm.errors import DataError

# In a folder's name: the model, before DeepSpeed's ZeRO stage.
MODEL = re.compile(r"[/_]([A-Z][A-Za-z]*\d\w*?)_z\d+(?=[/_])")
# In the log's name.
RANKS = re.compile(r"-nhosts\d+-ngpus?(\d+)-")
# In its lines.
JOB = re.compile(r"Job started at: (\d{4}-\d\d-\d\d-\d{6})(?!\d)")
STEP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+\].*\b(?:iter|step)=\d")


@dataclass(frozen=True)
class LoggedStart:
    """One start of a program: when its job began, when its first step was logged, and the name of the log."""

    model: str
    ranks: int
    start: datetime
    stop: datetime
    log: str

    @property
    def seconds(self) -> float:
        return (self.stop - self.start).total_seconds()


def read_log(path: Path) -> LoggedStart:
    """Read the start of a program from its log. Both times are in whole seconds, as the job script writes them.

    Raises:
        DataError: it cannot be read, or does not have the form above; the message says what is missing.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    models = MODEL.findall(f"{path.absolute().parent}/")
    ranks = RANKS.search(path.name)
    if not models or ranks is None:
        raise DataError(
            f"{path}: its path is not …_MODEL_z1_…/logs/…-nhosts4-ngpu16-….log. Of a run of mmm's, give the folder."
        )
    # The first line of each kind counts: later lines have later steps.
    job = JOB.search(text)
    if job is None:
        raise DataError(f"{path}: no line is `Job started at: YYYY-MM-DD-HHMMSS on HOST`")
    start = _time(path, job[1], "%Y-%m-%d-%H%M%S")
    step = STEP.search(text)
    if step is None:
        raise DataError(f"{path}: a job began ({start}), but no line holds a date, a time and `step=0` or `iter=0`")
    stop = _time(path, step[1], "%Y-%m-%d %H:%M:%S")
    if stop < start:
        raise DataError(f"{path}: the first step ({stop}) lies before the start of its job ({start})")
    # The nearest folder that names a model counts.
    return LoggedStart(models[-1], int(ranks[1]), start, stop, path.name)


def _time(path: Path, text: str, form: str) -> datetime:
    """Read a time. Raises DataError: its digits are not one."""
    try:
        return datetime.strptime(text, form)
    except ValueError:
        raise DataError(f"{path}: `{text}` is not a time") from None
