"""One run over many jobs of a scheduler, each of which waits for the one before; and a run again. Imports no torch.

command     a program's command line as a job runs it
queues      sbatch, qsub and flux: submit a script, make it follow another job
again       the command line that starts a recorded run again
"""
