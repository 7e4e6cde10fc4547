"""How a run ended, in one word and one line: kept in config.json and in the dataset's attributes."""

import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

from mmm.history.record import CONFIG, write_atomically
from mmm.launch.wire import ENDING

RUNNING = "running"
FINISHED = "finished"
INTERRUPTED = "interrupted"  # by a signal, or Ctrl-C
FAILED = "failed"  # by an exception
KILLED = "killed"  # it could not say anything any more
ENDED = (FINISHED, INTERRUPTED, FAILED)  # what a run says of itself
LONGEST = 500  # characters of an error that are kept


class Ending(NamedTuple):
    """`state` is one of the words above; `error` the signal's name, or the error's type and message, in one line."""

    state: str
    error: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.error}" if self.error else self.state

    def attrs(self) -> dict[str, str]:
        """As attributes: ``state``, and ``error`` if there is one."""
        return {"state": self.state} | ({"error": self.error} if self.error else {})

    def on(self, config: dict[str, Any]) -> dict[str, Any]:
        """`config` with this ending in place of the one it had."""
        return {name: value for name, value in config.items() if name not in ("state", "error")} | self.attrs()


def ending_of(error: BaseException | None) -> Ending:
    """What an exception that leaves a run's ``with`` block says; None is a run that finished."""
    if error is None:
        return Ending(FINISHED)
    if isinstance(error, KeyboardInterrupt):
        return Ending(INTERRUPTED, signal.Signals.SIGINT.name)
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return Ending(FINISHED)
        for number in ENDING:  # as a rank of `launch` ends after a signal, and as shells say it
            if error.code == 128 + number:
                return Ending(INTERRUPTED, signal.Signals(number).name)
    return Ending(FAILED, one_line(f"{type(error).__name__}: {error}"))


def one_line(text: str) -> str:
    """`text` without line breaks, and no longer than an attribute should be."""
    line = " ".join(text.split()).removesuffix(":")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def read_ending(attrs: Any) -> Ending | None:
    """The ending in a config or a dataset's attributes; None where there is none, as in older records."""
    state = attrs.get("state") if hasattr(attrs, "get") else None
    return Ending(state, str(attrs.get("error", ""))) if isinstance(state, str) else None


def config_with(text: str, ending: Ending) -> str:
    """The text of a config.json with that ending; one that is no mapping is anyone's, and stays as it is."""
    try:
        config = json.loads(text)
    except ValueError:
        return text
    return json.dumps(ending.on(config), indent=2, ensure_ascii=False) + "\n" if isinstance(config, dict) else text


def write_ending(folder: Path, ending: Ending) -> None:
    """Put the ending into the folder's config.json, if it has one. RecordError if that cannot be written."""
    text = read_config(folder)
    if (new := config_with(text, ending)) != text:
        write_atomically(folder / CONFIG, new.encode())


def read_config(folder: Path) -> str:
    """config.json's text; empty where there is none: a record may have none."""
    try:
        return (folder / CONFIG).read_text()
    except OSError:
        return ""


def config_ending(text: str) -> Ending | None:
    """The ending that the text of a config.json holds."""
    try:
        return read_ending(json.loads(text or "{}"))
    except ValueError:
        return None
