"""One run over many jobs of a scheduler: each job queues the next, until the run has made its steps. Imports no torch.

command     a program's command line as a job runs it
queues      sbatch and qsub: submit a script, make it follow another job, cancel it
chain       the jobs that a run has had, in a file of its folder, and whether another follows
"""
