"""Runs the target as the `__main__` of one rank, and reports how it failed. This code runs in each rank.

A rank that was started by exec is `python -m mmm_launch.host.child -m module args…`. A forked rank calls `run`.
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
    """Raised when SIGTERM or SIGHUP comes, so that `finally:` blocks run."""


def prepare() -> None:
    """Make this process a rank: signals raise exceptions, its forks die with it, and lines are not mixed up.

    SIGINT and SIGHUP stay ignored if launch was started to ignore them.
    """
    # launch ends a rank by SIGTERM, so that one is never ignored.
    signal.signal(signal.SIGTERM, _terminate)
    for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, _terminate)):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)
    forks.tie_forks()
    # Signals are blocked until a forked process has set its own handlers: Python would forget one in between.
    nested = threading.local()
    os.register_at_fork(
        before=lambda: setattr(nested, "mask", signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, nested.mask),
        after_in_child=lambda: _default_signals(nested.mask),
    )
    # Ranks share one terminal or file. Each line is written at once, so that lines of two ranks are not mixed up.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


def run(target: Target) -> int:
    """Run `target` as `__main__` and return the exit code. If it fails, report why to launch. Never raises.

    A process that the target forks may come back here too. It is not the rank, so it prints and reports nothing.
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
    sys.argv = [target.name, *target.args]
    if target.kind == "code":
        sys.argv[0] = "-c"
    first = target.first_path()
    if first is not None:
        sys.path.insert(0, first)
    contract.note_start()
    if target.kind == "script" and not target.name.endswith(".py"):
        # A folder, a zip file, compiled code, or a name without .py.
        runpy.run_path(target.name, run_name="__main__")
        return
    # This module stays. runpy would take its own __main__ away before atexit functions run.
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(_code(target, main), vars(main))


def _code_of(spec: ModuleSpec) -> CodeType | None:
    """Return a module's code. None: there is none."""
    get_code = getattr(spec.loader, "get_code", None)
    if get_code is not None:
        return get_code(spec.name)
    # pytest's own loader, which loads the packages of plugins, cannot return code: compile the source.
    text = source_of(spec)
    if text is None:
        return None
    return compile(text, spec.origin or spec.name, "exec", dont_inherit=True)


def _code(target: Target, main: ModuleType) -> CodeType:
    """Return the target's code. Set the attributes of module `main` that python sets in `__main__`."""
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
    code = None
    if spec is not None:
        code = _code_of(spec)
    if spec is None or code is None:
        raise ImportError(f"python cannot run a module named {target.name!r}", name=target.name)
    main.__spec__ = spec
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__file__ = spec.origin
    main.__dict__["__cached__"] = spec.cached
    sys.argv[0] = spec.origin or target.name
    return code


def _account(error: BaseException, caught: float) -> int:
    """Report `error` to launch, or print it if launch does not listen. Returns the exit code that it means.

    Args:
        caught: when it was caught, by `time.monotonic()`. By it launch tells which rank failed first.
    """
    if isinstance(error, SystemExit):
        # sys.exit(None), sys.exit(3); sys.exit("text") prints the text and exits with code 1.
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        if not contract.report("exit", f"{error.code}\n", 1, caught):
            print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    # A `UserError`: its message is all that the user needs, so it has no traceback.
    kind = getattr(error, "reported_as", None)
    if isinstance(kind, str) and contract.report(kind, str(error), USER_ERROR_EXIT, caught):
        return USER_ERROR_EXIT
    text = "".join(traceback.format_exception(type(error), error, _own_frames_off(error.__traceback__)))
    if not contract.report("traceback", text, 1, caught):
        print(text, end="", file=sys.stderr)
    return 1


def _own_frames_off(tb: TracebackType | None) -> TracebackType | None:
    """Leave out launch's own frames, so that a traceback begins in the user's program."""
    while tb is not None and tb.tb_frame.f_code.co_filename in OWN_FRAMES:
        tb = tb.tb_next
    return tb


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Handle SIGTERM and SIGHUP: raise `Terminated`, once."""
    # The scheduler and launch may both send a signal. The second would break off the cleaning up after the first.
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise Terminated(128 + signum)


def _default_signals(mask: set[int]) -> None:
    """Give a process that the target has forked the handling of SIGTERM that it would have without launch.

    Args:
        mask: signals that were blocked before the fork.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is _terminate:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _hold_signals() -> None:
    """Ignore the signals that end a rank: the target is over, and its atexit functions may finish."""
    # launch sends SIGKILL to a rank that takes longer than its grace.
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)


def finish(code: int) -> NoReturn:
    """End a forked rank as Python would, but without taking torch down, which takes 0.4 CPU-seconds in each rank.

    It does what `multiprocessing` does in its forked workers: join threads, run `atexit` functions, free the target's
    own modules with what they hold (which closes their files) and flush streams. Then the process is gone. C and C++
    libraries do not run their own code at exit, unless a variable of EXIT_TOOLS says that a tool needs it.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        if any(name in os.environ for name in EXIT_TOOLS):
            # SystemExit passes the `except` below: Python ends this process in its usual way.
            sys.exit(code)
        atexit._run_exitfuncs()
        # Like Python: the modules that were imported last are freed first.
        users_modules = [name for name in reversed(list(sys.modules)) if _is_users(name)]
        for name in users_modules:
            namespace = vars(sys.modules[name])
            # Names are cleared before the collector runs: it might close a file before its buffer is written.
            for attribute in [*namespace]:
                if attribute != "__builtins__":
                    namespace[attribute] = None
        gc.collect()
    except Exception:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _is_users(name: str) -> bool:
    """Say whether a module is the user's own: not installed, and not one of mmm's."""
    # `__dict__`, not getattr(module, …): a lazy module would import what it stands for.
    spec = getattr(sys.modules[name], "__dict__", {}).get("__spec__")
    top = name.partition(".")[0]
    return name == "__main__" or (top not in OURS and spec is not None and not is_installed(top, spec))


def main() -> int:
    """Run a rank that was started by exec. Returns its exit code."""
    fd = os.environ.pop(FAILURE_VARIABLE, None)
    if fd is not None:
        contract.attach(int(fd))
    prepare()
    target = own_target()
    if target is None:
        raise SystemExit("usage: python -m mmm_launch.host.child (-m MODULE | -c CODE | SCRIPT) ARGS…")
    return run(target)


def own_target() -> Target | None:
    """Read the target in this process's own command line. None: it names none."""
    # `python -m` has put the current folder first on sys.path, for this module. The target gets a place of its own.
    isolated = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if isolated:
        return targets.from_tail(["-I", *sys.argv[1:]])
    sys.path.pop(0)
    return targets.from_tail(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
