"""The `launch` command."""

import contextlib
import io
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mmm_launch import contract
from mmm_launch.channel.failures import say
from mmm_launch.errors import LaunchError, UserError
from mmm_launch.files import printable_lines
from mmm_launch.program import target
from mmm_launch.program.target import Target
from mmm_launch.run.attempts import Attempts
from mmm_launch.run.control import Run, Transport
from mmm_launch.spec import stage
from mmm_launch.spec.launch_spec import LaunchSpec, Value
from mmm_launch.spec.options import LaunchOptions, parse, recorded
from mmm_launch.spec.plan import plan

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch` and return its exit code.

    Args:
        argv: arguments of the command. Default: those of the command line.
    """
    begin = time.time()
    if argv is None:
        argv = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name may contain bytes that this terminal's encoding does not have.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        missing = contract.missing_folder()
        if missing:
            raise LaunchError(missing)
        return _main(list(argv), begin)
    except UserError as error:
        say(f"launch: error: {printable_lines(error)}")
        return 2
    # Ctrl-C before there are ranks. Later `Signals` catches it and it goes to the ranks.
    except KeyboardInterrupt:
        return 130


def _main(argv: list[str], begin: float) -> int:
    options = parse(argv)
    if not options.command:
        raise LaunchError("no command to launch.\n  Try: launch -n 4 python3 -m mmm.examples.fsdp_tp")
    program = target.parse(options.command)
    target.check(program)
    spec = plan(program, options)
    for note in spec.notes:
        say(f"launch: {note}")
    if options.dry_run:
        return show(spec)
    own = {
        contract.LINE_VARIABLE: recorded(argv, options),
        contract.ATTEMPTS_VARIABLE: uuid.uuid4().hex,
        # The start of the process is earlier than `begin` by Python's own start-up. Only /proc knows it.
        contract.BEGAN_VARIABLE: repr(contract.process_start() or begin),
    }
    return run_attempts(program, spec, options, own)


def run_attempts(program: Target, spec: LaunchSpec, options: LaunchOptions, own: dict[str, str]) -> int:
    """Start the ranks of a spec. After a failure plan and start them again, as long as `Attempts` allows.

    Args:
        own: environment variables that launch itself sets in every rank.

    Returns:
        The exit code of the last attempt.
    """
    with staged(spec) as archive:
        # Later attempts are planned from the options: they use the archive that is already written.
        options.archive = archive
        spec = replace(spec, stage=archive)
        if not spec.is_local:
            from mmm_launch.spec.table import table

            say(table(spec))
        attempts = Attempts(spec, options.retries)
        while True:
            own[contract.ATTEMPT_VARIABLE] = str(attempts.number)
            if spec.elastic is not None:
                own[contract.ELASTIC_VARIABLE] = str(spec.elastic)
            for name, value in own.items():
                spec.shared[name] = Value(value, "launch")
            run = Run(
                transport(spec, options.start_timeout),
                spec.ranks,
                options.timeout,
                options.grace,
            )
            code = run.run()
            if not attempts.starts_again(run, code):
                return code
            # The seconds of start-up that the next attempt records are counted from here, not from the job's start.
            os.environ.pop(contract.STARTED_VARIABLE, None)
            own[contract.BEGAN_VARIABLE] = repr(time.time())
            # The number of ranks, the ports and the hosts may differ from the attempt before.
            options.attempt = attempts.number
            options.places = attempts.in_use()
            spec = plan(program, options)


@contextlib.contextmanager
def staged(spec: LaunchSpec) -> Iterator[stage.Stage | None]:
    """Write the archive of --stage, and remove it when the run has ended. Yields None without --stage."""
    if spec.stage is None:
        yield None
        return
    from mmm_launch.host.stage import packed

    with packed(spec.stage) as archive:
        yield archive


def show(spec: LaunchSpec) -> int:
    """Print what would be started, for --dry-run. Returns the exit code."""
    from mmm_launch.program.preloads import preloads
    from mmm_launch.spec import host_spec, table

    host = None
    modules: list[str] = []
    if spec.is_local:
        host = host_spec.make(spec.target, spec.host_command(0, 0, spec.variables))
        if host.fork:
            # The modules are found by reading source text. Nothing is imported for this.
            modules = [preload.module for preload in preloads(spec.target)]
    text = table.table(spec, host, modules)
    try:
        print(text, flush=True)
    # `| head` has ended, or the disk is full. Without os._exit Python would try to flush once more.
    except OSError:
        os._exit(1)
    return 0


def transport(spec: LaunchSpec, start_timeout: float) -> Transport:
    """Make what starts the ranks and reaches them: `LocalRanks` on this host, `Backend` on many."""
    # A run imports only the modules of its own kind: launch has to answer at once.
    if spec.is_local:
        from mmm_launch.run.local import LocalRanks
        from mmm_launch.spec import host_spec

        return LocalRanks(host_spec.make(spec.target, spec.host_command(0, 0, spec.variables)))
    from mmm_launch.run.backend import Backend

    return Backend(spec, start_timeout)
