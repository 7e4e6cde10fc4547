"""Known machines, as data: a JSON file each, in `known/`, for `launch`, `mmm plan` and `mmm doctor`. Imports no torch.

machine     what a file says, and its strict reader
find        the machine of a name, of an environment, of this host; the user's own files
queues      which jobs the queues of a machine take
"""
