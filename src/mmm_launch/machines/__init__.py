"""Known machines, for `launch`, `mmm plan` and `mmm doctor`. Each is a JSON file in `known/`. It does not import torch.

machine     what a machine file contains, and its strict reader
find        finds a machine by its name or by a job's environment; the user's own files
everywhere  a JSON file: what may be printed on every machine, and whose fault it is
queues      which jobs the queues of a machine take
"""
