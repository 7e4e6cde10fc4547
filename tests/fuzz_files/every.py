"""Every kind of file that mmm reads."""

from fuzz_files import data, machines, records, weights

KINDS = (*weights.KINDS, *data.KINDS, *records.KINDS, *machines.KINDS)
