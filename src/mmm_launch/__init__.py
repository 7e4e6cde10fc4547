"""From a shell to running ranks. Imports the standard library alone.

    main        the command: reads the options, makes a `LaunchSpec`, runs it
    program/    what each rank runs: CMD, and what it imports
    spec/       what to start and where: a `LaunchSpec`, of this host or of those of a job or a list
    run/        the process of `launch`: `Run`, from the start of a plan to its exit code, over a `Transport` to the
                ranks, on this host or on many; `Attempts` says whether another attempt of an elastic run follows
    host/       what runs on each host: the agent that mpiexec or srun starts, the fork server, a rank's first code
    channel/    what these processes say to each other

It has to answer at once, so the process of `launch` imports the standard library alone. Imports go from `host` to
`run` to `channel` to `spec` to `program`; a process is started by its module's name.
"""

__version__ = "0.1.0"
