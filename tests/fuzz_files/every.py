"""Every kind of file that mmm reads."""

from fuzz_files import data, images, machines, models, records, weights

KINDS = (*weights.KINDS, *models.KINDS, *data.KINDS, *images.KINDS, *records.KINDS, *machines.KINDS)
