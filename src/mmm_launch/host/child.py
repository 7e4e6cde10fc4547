"""Runs the target as one rank's `__main__`, and reports how it failed.

`python -m mmm_launch.host.child -m module args…` runs a rank that was started by exec; a forked rank calls `run`.
"""

import atexit
import builtins
import contextlib
import gc
import importlib.util
import io
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import NoReturn

from mmm_launch import contract
from mmm_launch.channel.instructions import FAILURE_VARIABLE
from mmm_launch.contract import ENDING, USER_ERROR_EXIT
from mmm_launch.host import forks
from mmm_launch.program import target as targets
from mmm_launch.program.preloads import OURS, is_installed
from mmm_launch.program.target import Target, source_of

INTERRUPTED = 128 + signal.SIGINT
# With one of these set, a profiler may have to write its results at the exit of the process.
EXIT_TOOLS = ("LD_PRELOAD", "CUDA_INJECTION64_PATH", "HSA_TOOLS_LIB", "ROCP_TOOL_LIBRARIES")
OWN_FRAMES = (__file__, runpy.__file__, "<frozen runpy>")


class Terminated(SystemExit):
    """SIGTERM or SIGHUP, as an exception: `finally:` blocks run."""


def prepare() -> None:
    """Make this process a rank: signals become exceptions, forks die with it, each line is written whole.

    SIGINT and SIGHUP stay ignored where launch was started to ignore them.
    """
    signal.signal(signal.SIGTERM, _terminate)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, _terminate)):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    forks.tie_forks()
    # Held back while a fork makes the new process's handling its own: Python would forget one that came in between.
    nested = threading.local()
    os.register_at_fork(
        before=lambda: setattr(nested, "mask", signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, nested.mask),
        after_in_child=lambda: _default_signals(nested.mask),
    )
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


def run(target: Target) -> int:
    """Run `target` as `__main__` and return the exit code, after a report if it failed. Never raises.

    A process that the target forks may come back here too. It is not the rank: it prints, and reports nothing.
    """
    try:
        # The fork server blocked these signals before it forked this rank.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        run_as_main(target)
        code = 0
    except BaseException as error:
        caught = time.monotonic()
        _hold_signals()
        code = _account(error, caught)
    _hold_signals()
    return code


def run_as_main(target: Target) -> None:
    """Run `target` as python would. Raises whatever it raises."""
    sys.argv = ["-c" if target.kind == "code" else target.name, *target.args]
    first = target.first_path()
    if first is not None:
        sys.path.insert(0, first)
    contract.note_start()
    if target.kind == "script" and not target.name.endswith(".py"):
        # A folder, a zip file, compiled code, or a name without .py.
        runpy.run_path(target.name, run_name="__main__")
        return
    sys.modules["__main__"] = main = ModuleType("__main__")  # it stays: runpy's own is gone when atexit runs
    exec(_code(target, main), vars(main))


def _code_of(spec: ModuleSpec) -> CodeType | None:
    """A module's code. pytest's loader, which has what a plugin's package has, gives none: then of its source."""
    if (get_code := getattr(spec.loader, "get_code", None)) is not None:
        return get_code(spec.name)
    text = source_of(spec)
    return None if text is None else compile(text, spec.origin or spec.name, "exec", dont_inherit=True)


def _code(target: Target, main: ModuleType) -> CodeType:
    """The target's code. Gives the module `main` what python gives `__main__`."""
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    if target.kind == "code":
        return compile(target.name, "<string>", "exec", dont_inherit=True)
    if target.kind == "script":
        # An absolute path, as python gives: the program may change its working folder.
        main.__file__ = path = os.path.abspath(target.name)
        main.__loader__ = SourceFileLoader("__main__", path)
        main.__dict__["__cached__"] = None
        with io.open_code(path) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    # find_spec imports the packages that the module is in, as python does.
    spec = importlib.util.find_spec(target.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target.name}.__main__")
    code = _code_of(spec) if spec is not None else None
    if spec is None or code is None:
        raise ImportError(f"python cannot run a module named {target.name!r}", name=target.name)
    main.__spec__, main.__loader__, main.__package__, main.__file__ = spec, spec.loader, spec.parent, spec.origin
    main.__dict__["__cached__"] = spec.cached
    sys.argv[0] = spec.origin or target.name
    return code


def _account(error: BaseException, caught: float) -> int:
    """Report `error` and return the exit code it means."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        if not contract.report("exit", f"{error.code}\n", 1, caught):
            print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    kind = getattr(error, "reported_as", None)
    if isinstance(kind, str) and contract.report(kind, str(error), USER_ERROR_EXIT, caught):
        return USER_ERROR_EXIT
    text = "".join(traceback.format_exception(type(error), error, _own_frames_off(error.__traceback__)))
    if not contract.report("traceback", text, 1, caught):
        print(text, end="", file=sys.stderr)
    return 1


def _own_frames_off(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename in OWN_FRAMES:
        tb = tb.tb_next
    return tb


def _terminate(number: int, frame: FrameType | None) -> None:
    """Once: a scheduler and launch may both say it, and the second would break off what the first has begun."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Terminated(128 + number)


def _default_signals(mask: set[int]) -> None:
    """In a process that the target forks: SIGTERM ends it as it would without launch. `mask`: before the fork."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _terminate:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _hold_signals() -> None:
    """The target is over: let what runs at exit finish. Launch kills a rank that takes longer than its grace."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def finish(code: int) -> NoReturn:
    """End a forked rank as the interpreter would, but without taking torch down, which costs each rank 0.4 CPU-s.

    As in `multiprocessing`'s forked workers: threads are joined, `atexit` functions run, the target's own modules and
    what they hold are freed (which closes their files), streams are flushed; then the process is gone. What C and C++
    libraries do at exit is left out, unless the environment says that a tool needs it.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        if any(name in os.environ for name in EXIT_TOOLS):
            sys.exit(code)
        atexit._run_exitfuncs()
        for name in [name for name in reversed(list(sys.modules)) if _is_users(name)]:
            names = vars(sys.modules[name])
            for each in names.keys() - {"__builtins__"}:
                # The collector might close a file before its buffer is written; clearing names closes it in
                # order.
                names[each] = None
        gc.collect()
    except Exception:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _is_users(name: str) -> bool:
    # Not getattr, which would have a lazy module import what it stands for.
    spec = getattr(sys.modules[name], "__dict__", {}).get("__spec__")
    top = name.partition(".")[0]
    return name == "__main__" or (top not in OURS and spec is not None and not is_installed(top, spec))


def main() -> int:
    fd = os.environ.pop(FAILURE_VARIABLE, None)
    if fd is not None:
        contract.attach(int(fd))
    prepare()
    target = own_target()
    if target is None:
        raise SystemExit("usage: python -m mmm_launch.host.child (-m MODULE | -c CODE | SCRIPT) ARGS…")
    return run(target)


def own_target() -> Target | None:
    """The target in this process's own command line.

    `python -m` has put the current folder first on sys.path, for a module that is not the target: takes it off.
    """
    isolated = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if not isolated:
        sys.path.pop(0)
    return targets.from_tail([*(["-I"] if isolated else []), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
