"""Starts the ranks of a program. It imports only the standard library.

    main        the command: reads the options, makes a `LaunchSpec` and runs it
    program/    what each rank runs: CMD, and the modules that it imports
    spec/       what to start and where: a `LaunchSpec`, for this host or for the hosts of a job or a list
    run/        the process of `launch`: `Run` goes from the start of a plan to its exit code. A `Transport` reaches the
                ranks, on this host or on many. `Attempts` decides whether another attempt follows a failed one
    host/       what runs on each host: the agent that mpiexec or srun starts, the fork server, a rank's first code
    channel/    the messages between these processes

`launch` has to answer at once, so its process imports only the standard library. `host` may import `run`, which may
import `channel`, then `spec`, then `program`. One process starts another by the name of its module.
"""

__version__ = "0.1.0"
