"""The fork server, a process between launch and its ranks: it imports what the target needs, once, and forks the ranks.

It is `python [flags] -m mmm_launch.host.forkserver -m module args…`. On many hosts each host has one, started by the
host's agent. The target runs only in the forked ranks: the fork server imports nothing of the user's, touches no
accelerator and starts no thread. If ranks cannot be forked, it imports nothing and executes each rank as a new process.

Afterwards it passes signals on and tells launch how each rank ended. If launch itself is gone, it kills every process
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

# Importing these opens MPI, touches a device or starts threads. Each rank imports them itself.
NOT_BEFORE_FORK = (
    *("mpi4py.MPI", "horovod", "cupy", "jaxlib", "tensorflow", "transformer_engine", "deepspeed", "apex", "ray"),
    *("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"),
)
# Files that a runtime keeps open once it has touched a device: CUDA's (also under Windows), and AMD's. Counting devices
# opens other files, which a fork does not hurt: NVML opens /dev/nvidiactl and /dev/nvidia0, …, but not /dev/nvidia-uvm,
# by which CUDA maps memory; for AMD's it is /dev/dri, but not /dev/kfd. Ranks on Intel GPUs are not forked.
DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/dxg", "/dev/kfd")
# torch imports this at the first use of a DTensor, FSDP2 or an optimizer, which would cost each rank the time.
# Private: torch._dynamo, torch.distributed._composable, seen in 2.10 to 2.14; instead: nothing.
TORCH_LATER = "torch._dynamo"
TORCH_LATER_FOR = {"torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed._composable"}
OPEN_FILES = "/proc/self/fd"
# Python ignores these in its own process, and exec would pass that on. No other program expects it.
PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)


def main() -> NoReturn:
    """Run the fork server, and each rank that it forks."""
    todo = Instructions.read(int(os.environ.pop(FORK_SERVER_VARIABLE)))
    # Python's own handler would raise KeyboardInterrupt in the middle of an import.
    interrupt: signal.Handlers = signal.SIG_DFL
    if signal.SIGINT in todo.ignored:
        interrupt = signal.SIG_IGN
    signal.signal(signal.SIGINT, interrupt)
    # A scheduler sends these to every process of the job: they are for the ranks to handle.
    for signum in (*PASSED_ON, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
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
        # What is still in the buffer would be printed once more by each rank.
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            # From here on this process is a rank. Neither branch returns.
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
    """Import the modules that `target` will import, as far as they are safe before a fork.

    If an import goes wrong, this process starts anew without that module. The import would fail in the target too, and
    may have left half of its work behind: the ranks get a process in which it was never tried, and raise the error
    themselves.
    """
    # The collector would look through torch's many new objects again and again.
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
            # The package itself is missing: nothing was left behind. The target may try it and do without.
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
    # After three modules give up: each new start imports everything once more.
    if len(todo.skip) >= 3:
        skip = "*"
    os.environ[FORK_SERVER_VARIABLE] = str(replace(todo, skip=[*todo.skip, skip]).write())
    flags = sys.orig_argv[1 : sys.orig_argv.index("-m")]
    os.execv(sys.executable, [sys.executable, *flags, "-m", FORK_SERVER, *sys.argv[1:]])


def _device_open() -> bool:
    """Say whether an import has touched a device: this process then has a device file open."""
    with contextlib.suppress(OSError):
        for name in os.listdir(OPEN_FILES):
            # The file may have been closed since it was listed.
            with contextlib.suppress(OSError):
                if os.readlink(f"{OPEN_FILES}/{name}").startswith(DEVICE_FILES):
                    return True
    return False


def _shadowed(first: str) -> bool:
    """Say whether the target's folder `first` has a file that it would have imported instead of a preloaded module."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        names = {os.path.splitext(name)[0] for name in os.listdir(first or os.curdir)}
    for name in names & set(sys.modules) - set(sys.stdlib_module_names):
        origin = getattr(sys.modules[name], "__file__", None)
        as_file = os.path.join(first, f"{name}.py")
        as_package = os.path.join(first, name, "__init__.py")
        for path in (as_file, as_package):
            if origin and os.path.exists(path) and not os.path.samefile(path, origin):
                return True
    return False


def execute(todo: Instructions, reports: socket.socket) -> NoReturn:
    """Replace this forked process by the rank's command.

    launch has checked that the command exists. If it still cannot run, a report tells launch why.
    """
    # The module CHILD sets these signals itself; another program never would.
    if CHILD not in todo.command:
        for signum in PYTHONS:
            signal.signal(signum, signal.SIG_DFL)
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
    """Knows the ranks, and watches over them until the last one has ended.

    Attributes:
        todo: what the process that has started this one wants.
        pid: this process's own.
        ranks: pid → number of the rank, for each rank that lives.
        link: connection to the process that has started this one.
        reports: socket from which this process reads why ranks end.
        reports_end: the ranks' end of that socket.
        reason: descriptor of a file in memory that says why launch ends the run. It is empty until launch does. None:
            this system has no such files.
        wake_read: has a byte to read once SIGCHLD has come.
    """

    def __init__(self, todo: Instructions) -> None:
        self.todo = todo
        self.pid = os.getpid()
        self.ranks: dict[int, int] = {}
        self.link = Link(socket.socket(fileno=todo.control))
        self.reports, self.reports_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (self.reports, self.reports_end):
            # A long traceback has to fit: a datagram is sent whole or not at all.
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        self.reports.setblocking(False)
        self.reason: int | None = None
        if hasattr(os, "memfd_create"):
            self.reason = os.memfd_create("reason")
            # Ranks get its path, not its descriptor: a program may close every file that it has not opened.
            os.environ[VERDICT_VARIABLE] = f"/proc/{self.pid}/fd/{self.reason}"
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)

    def become_rank(self, variables: dict[str, str], forked: bool) -> None:
        """Turn this forked process into a rank: close what belongs to the fork server, set the rank's environment.

        Args:
            variables: the variables in which this rank differs.
            forked: whether the rank runs in this process. Otherwise it executes its command.
        """
        forks.die_with_parent(self.pid)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM, *PASSED_ON):
            handler: signal.Handlers = signal.SIG_DFL
            if signum in self.todo.ignored:
                handler = signal.SIG_IGN
            signal.signal(signum, handler)
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
        n_threads = None
        if threads:
            n_threads = int(threads)
        forks.renew_thread_pools(n_threads)
        numpy = sys.modules.get("numpy.random")
        # Without a new seed every rank would draw the same "random" numbers.
        if numpy is not None:
            numpy.seed()

    def watch(self) -> None:
        """Serve launch until every rank has ended."""
        selector = selectors.DefaultSelector()
        for source in (self.link, self.reports, self.wake_read):
            selector.register(source, selectors.EVENT_READ)
        # A rank may have ended before SIGCHLD was watched.
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
        """Send every rank the signal that launch asks for, after noting why."""
        if message.get("reason") and self.reason is not None:
            os.pwrite(self.reason, message["reason"].encode("utf-8", "backslashreplace"), 0)
        signum = message.get("signal") or message["end"]
        # A rank that has ended is not reaped yet, so no other process can have its pid.
        for pid in self.ranks:
            os.kill(pid, signum)

    def tell(self, message: Message) -> None:
        # If launch is gone, `watch` reads the end of the connection and ends the ranks.
        with contextlib.suppress(Lost):
            self.link.send(message)

    def pass_reports_on(self) -> None:
        """Send launch every report that ranks have sent since the last call."""
        # recv() raises BlockingIOError once there is no more.
        with contextlib.suppress(BlockingIOError):
            while True:
                report = Report.loads(self.reports.recv(SOCKET_BUFFER))
                # launch may run on another host, whose clock differs: tell it how long ago, not when.
                self.tell({"report": vars(report), "ago": time.monotonic() - report.time})

    def reap(self) -> None:
        """Tell launch which ranks have ended. Their reports are passed on first, since they say why."""
        ended: list[Message] = []
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in self.ranks:
                code = os.waitstatus_to_exitcode(status)
                ended.append({"ended": self.ranks.pop(pid), "pid": pid, "code": code})
        if ended:
            self.pass_reports_on()
        for message in ended:
            self.tell(message)

    def kill_all(self) -> NoReturn:
        """Kill every process of the ranks, and this one: launch, or the agent, is gone."""
        processes.end(os.getsid(0), os.environ[MARKER_VARIABLE], grace=0.0)
        os.killpg(0, signal.SIGKILL)
        os._exit(1)


if __name__ == "__main__":
    main()
