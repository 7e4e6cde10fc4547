"""How long imports take, by top-level package: a finder before all others, which times modules as they are executed."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportTimer:
    """Seconds of wall time by package, while it is on.

    A package is charged for its own modules and what they are the first to need of the standard library, and not for
    the other packages that they import: the seconds add up to the time spent. Only the step from one package into
    another is timed, not each module: torch's 2,000 modules cost a comparison each. Only the thread that made the timer
    is looked at.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[str] = []  # packages whose modules are being executed, innermost last
        self._since = 0.0
        self._thread = threading.get_ident()

    def start(self) -> None:
        if self not in sys.meta_path:
            self._thread = threading.get_ident()
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def stop(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The next finders' spec, its loader timed, where an import goes from one package into another; else None."""
        package = name.partition(".")[0]
        if (self._inside and self._inside[-1] == package) or package in sys.stdlib_module_names:
            return None
        if threading.get_ident() != self._thread or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # type: ignore[arg-type]
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._time(spec, package)
                return spec
        return None

    def _time(self, spec: ModuleSpec, package: str) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None or isinstance(loader, type):
            return

        def timed(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is as it was, for whoever asks it for a source
            self._enter(package)
            try:
                execute(module)
            finally:
                self._leave()

        with contextlib.suppress(AttributeError, TypeError):  # a loader that takes no attributes is not timed
            loader.exec_module = timed  # type: ignore[method-assign]

    def _enter(self, package: str) -> None:
        self._charge()
        self._inside.append(package)

    def _leave(self) -> None:
        self._charge()
        self._inside.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._inside:
            self.seconds[self._inside[-1]] = self.seconds.get(self._inside[-1], 0.0) + now - self._since
        self._since = now
