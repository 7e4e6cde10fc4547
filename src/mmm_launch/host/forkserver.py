"""The process between launch and its ranks: it imports once what the target will need, and forks the ranks.

It runs `python [flags] -m mmm_launch.host.forkserver -m module args…`. On many hosts each has one, which
the host's agent has started. Only in the forked ranks does the target run: here nothing of the user's is imported, no
accelerator is touched and no thread is started. Where ranks cannot be forked it imports nothing, and executes each rank
as a new process.

Afterwards it passes on signals, tells launch which rank ended how, and if launch itself is gone it kills every process
of the run.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
import weakref
from dataclasses import replace
from typing import NoReturn

from mmm_launch import contract
from mmm_launch.channel.instructions import (
    CHILD,
    FAILURE_VARIABLE,
    FORK_SERVER,
    FORK_SERVER_VARIABLE,
    PASSED_ON,
    Instructions,
)
from mmm_launch.channel.link import Link, Lost, Message
from mmm_launch.contract import ENDING, MARKER_VARIABLE, SOCKET_BUFFER, VERDICT_VARIABLE, Report
from mmm_launch.host import child, forks
from mmm_launch.program.preloads import preloads
from mmm_launch.program.target import Target
from mmm_launch.run import processes
from mmm_launch.spec import binding

# Import opens MPI, a device or threads: left to the ranks, also where another package imports them.
NOT_BEFORE_FORK = (
    *("mpi4py.MPI", "horovod", "cupy", "jaxlib", "tensorflow", "transformer_engine", "deepspeed", "apex", "ray"),
    *("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"),
)
# What a runtime keeps open once it has touched a device: CUDA's, also of Windows, and AMD's. NVML, by which PyTorch
# counts NVIDIA's devices, opens /dev/nvidiactl and /dev/nvidia0, …, but no /dev/nvidia-uvm, which CUDA maps memory by;
# what counts AMD's opens /dev/dri, but no /dev/kfd. A fork does not hurt those. Ranks on Intel's are not forked.
DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/dxg", "/dev/kfd")
# What torch imports at the first use of a DTensor, FSDP2 or an optimizer, and each rank would otherwise pay for.
# Private: torch._dynamo, torch.distributed._composable, seen in 2.10 to 2.14; instead: nothing.
TORCH_LATER = "torch._dynamo"
TORCH_LATER_FOR = {"torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed._composable"}
OPEN_FILES = "/proc/self/fd"
# Python ignores these in its own process, and exec would pass that on. No other program expects it.
PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)


def main() -> NoReturn:
    """The fork server's whole life, and that of each rank it forks."""
    todo = Instructions.read(int(os.environ.pop(FORK_SERVER_VARIABLE)))
    signal.signal(signal.SIGINT, signal.SIG_IGN if signal.SIGINT in todo.ignored else signal.SIG_DFL)
    # A scheduler sends these to every process of the job: they are for the ranks to handle.
    for number in (*PASSED_ON, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Until there are ranks this process simply dies with its parent. Later `watch` has to end them first.
    forks.die_with_parent(todo.parent)
    os.set_inheritable(todo.control, False)
    # None where ranks are not forked: they are executed as new processes.
    target = child.own_target()
    if target is not None:
        preload(target, todo)
    server = ForkServer(todo)
    server.tell({"started": True})
    # A forked rank unblocks them once it can end in order.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for variables in todo.ranks:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            server.become_rank(variables, forked=target is not None)
            if target is not None:
                child.finish(child.run(target))
            execute(todo, server.reports_end)
        server.ranks[pid] = int(variables["RANK"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    forks.outlive_parent()
    server.watch()
    # This process has nothing left to write, and an ordinary exit would spend 0.4 s taking torch down.
    os._exit(0)


def preload(target: Target, todo: Instructions) -> None:
    """Import what `target` will import and is safe to have before a fork. If that goes wrong, start anew without it.

    An import that fails here would fail in the target too, and may have left half its work behind: the ranks get a
    process in which it was never tried, and raise it themselves.
    """
    gc.disable()
    wanted = preloads(target)
    if "*" in todo.skip:
        wanted = []
    for preloaded in wanted:
        package = preloaded.module.partition(".")[0]
        if preloaded.module in todo.skip or preloaded.module in NOT_BEFORE_FORK or package in NOT_BEFORE_FORK:
            continue
        began = time.perf_counter()
        try:
            __import__(preloaded.module, fromlist=preloaded.names)
        except ModuleNotFoundError as error:
            if error.name != package:
                start_anew(todo, preloaded.module)
        except BaseException:
            start_anew(todo, preloaded.module)
        if any(name in sys.modules for name in NOT_BEFORE_FORK) or _device_open():
            start_anew(todo, preloaded.module)
        seconds = contract.shared_imports.get(package, 0.0)
        contract.shared_imports[package] = seconds + time.perf_counter() - began
    if TORCH_LATER_FOR & set(sys.modules):
        with contextlib.suppress(ImportError):
            __import__(TORCH_LATER)
    first = target.first_path()
    if first is not None and _shadowed(first):
        start_anew(todo, "*")
    for finalizer in getattr(weakref.finalize, "_registry", ()):
        # PyTorch's finalizers take its operators down one by one, which each rank would do again at its end.
        finalizer.atexit = False
    # Keeps the collector off the shared pages, so they stay shared. Collecting first would cost more than it
    # frees.
    gc.freeze()
    gc.enable()


def start_anew(todo: Instructions, skip: str) -> NoReturn:
    """Replace this process by a new fork server that does not preload module `skip`."""
    os.set_inheritable(todo.control, True)
    skip = "*" if len(todo.skip) >= 3 else skip
    os.environ[FORK_SERVER_VARIABLE] = str(replace(todo, skip=[*todo.skip, skip]).write())
    flags = sys.orig_argv[1 : sys.orig_argv.index("-m")]
    os.execv(sys.executable, [sys.executable, *flags, "-m", FORK_SERVER, *sys.argv[1:]])


def _device_open() -> bool:
    """Whether an import has touched a device, by the files that this process has open."""
    with contextlib.suppress(OSError):
        for name in os.listdir(OPEN_FILES):
            # The file may have been closed since it was listed.
            with contextlib.suppress(OSError):
                if os.readlink(f"{OPEN_FILES}/{name}").startswith(DEVICE_FILES):
                    return True
    return False


def _shadowed(first: str) -> bool:
    """Whether the target would have got a file of its folder `first` in place of a preloaded module."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        names = {os.path.splitext(name)[0] for name in os.listdir(first or os.curdir)}
    for name in names & set(sys.modules) - set(sys.stdlib_module_names):
        origin = getattr(sys.modules[name], "__file__", None)
        for path in (os.path.join(first, f"{name}.py"), os.path.join(first, name, "__init__.py")):
            if origin and os.path.exists(path) and not os.path.samefile(path, origin):
                return True
    return False


def execute(todo: Instructions, reports: socket.socket) -> NoReturn:
    """Become the rank's command. `launch` has checked that it exists; if it still cannot run, the report says why."""
    # The module CHILD sets these signals itself; another program never would.
    if CHILD not in todo.command:
        for number in PYTHONS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    try:
        os.execvp(todo.command[0], todo.command)
    except OSError as error:
        contract.attach(reports.detach())
        contract.report(
            "exit", f"launch: error: {todo.command[0]} cannot be run: {error.strerror}\n", 126, time.monotonic()
        )
        os._exit(126)


class ForkServer:
    """Knows the ranks, and watches over them until the last is gone.

    Attributes:
        ranks: pid → rank, of those that live.
        link: to the process that has started this one.
        reports: has what ranks say of why they end, which they send to reports_end.
        reason: descriptor of a file in memory that says why launch ends the run: empty until it does. None: no /proc.
    """

    def __init__(self, todo: Instructions) -> None:
        self.todo = todo
        self.pid = os.getpid()
        self.ranks: dict[int, int] = {}
        self.link = Link(socket.socket(fileno=todo.control))
        self.reports, self.reports_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (self.reports, self.reports_end):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        self.reports.setblocking(False)
        self.reason: int | None = None
        if hasattr(os, "memfd_create"):
            self.reason = os.memfd_create("reason")
            # By its path: ranks may close every file that they have not opened.
            os.environ[VERDICT_VARIABLE] = f"/proc/{self.pid}/fd/{self.reason}"
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)

    def become_rank(self, variables: dict[str, str], forked: bool) -> None:
        """In the forked child: drop everything of the fork server's, take the rank's own environment.

        Args:
            forked: whether the rank goes on in this process; else it executes its command.
        """
        forks.die_with_parent(self.pid)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, *PASSED_ON):
            signal.signal(number, signal.SIG_IGN if number in self.todo.ignored else signal.SIG_DFL)
        self.link.close()
        self.reports.close()
        for descriptor in (self.reason, self.wake_read, self.wake_write):
            if descriptor is not None:
                os.close(descriptor)
        os.environ.update(variables)
        cpus = os.environ.pop(binding.CPUS_VARIABLE, None)
        if cpus is not None:
            os.sched_setaffinity(0, binding.cpu_list(cpus))
        if not forked:
            self.reports_end.set_inheritable(True)
            os.environ[FAILURE_VARIABLE] = str(self.reports_end.fileno())
            return
        contract.attach(self.reports_end.detach())
        child.prepare()
        # torch was loaded in the fork server, with the fork server's number of threads.
        threads = variables.get("OMP_NUM_THREADS")
        forks.renew_thread_pools(int(threads) if threads else None)
        numpy = sys.modules.get("numpy.random")
        # Without a new seed every rank would draw the same "random" numbers.
        if numpy is not None:
            numpy.seed()

    def watch(self) -> None:
        """Serve launch until every rank has ended."""
        selector = selectors.DefaultSelector()
        for source in (self.link, self.reports, self.wake_read):
            selector.register(source, selectors.EVENT_READ)
        self.reap()
        while self.ranks:
            ready = [selected.fileobj for selected, _ in selector.select()]
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
            self.pass_reports_on()
            self.reap()
            if self.link in ready:
                try:
                    messages = self.link.read()
                except Lost:
                    self.kill_all()
                for message in messages:
                    self.obey(message)

    def obey(self, message: Message) -> None:
        if message.get("reason") and self.reason is not None:
            os.pwrite(self.reason, message["reason"].encode("utf-8", "backslashreplace"), 0)
        number = message.get("signal") or message["end"]
        # A rank that has ended is not reaped yet, so no other process can have its pid.
        for pid in self.ranks:
            os.kill(pid, number)

    def tell(self, message: Message) -> None:
        # If launch is gone, `watch` reads the end of the connection and ends the ranks.
        with contextlib.suppress(Lost):
            self.link.send(message)

    def pass_reports_on(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                report = Report.loads(self.reports.recv(SOCKET_BUFFER))
                self.tell({"report": vars(report), "ago": time.monotonic() - report.time})

    def reap(self) -> None:
        """Tell which ranks have ended. What they have reported before is told before."""
        ended: list[Message] = []
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in self.ranks:
                ended.append({"ended": self.ranks.pop(pid), "pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if ended:
            self.pass_reports_on()
        for message in ended:
            self.tell(message)

    def kill_all(self) -> NoReturn:
        """launch, or the agent, is gone: nothing may be left of the ranks."""
        processes.end(os.getsid(0), os.environ[MARKER_VARIABLE], grace=0.0)
        os.killpg(0, signal.SIGKILL)
        os._exit(1)


if __name__ == "__main__":
    main()
