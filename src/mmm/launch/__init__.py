"""From a shell to running ranks. Imports no torch.

`main` reads the command line (`options`). On one host `local` turns it into a `LaunchPlan`, and `supervise` runs it and
ends everything. In a job (`job`: `slurm`, `pbs`) or on a list of hosts, `cluster` makes a `ClusterPlan`, with what is
known of the machine (`sites`), and `head` runs it through `mpiexec` (`mpi`) or `srun`; on the hosts,
`mmm.runtime.enter` does what `supervise` does here.
"""
