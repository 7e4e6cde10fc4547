"""Pipelines together with what repeats or divides the work of a stage: checkpointing, tiles, the loss in chunks."""

import pytest
import torch

from mmm.errors import LayoutError
from mmm.layout import Techniques
from mmm.models.llama.model import Transformer
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import Layout
from mmm.parallel.partition import partition_model
from mmm.parallel.pp.schedules import SCHEDULES
from support import reference

SPLIT = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits)
LAYOUT = Layout(pp=2, dp_shard=1)


@pytest.mark.parametrize("schedule", SPLIT)
def test_selective_checkpointing_is_refused_where_backward_is_split(schedule):
    with torch.device("meta"):
        model, sample = Transformer(reference.CONFIG), torch.zeros(8, reference.SEQ, dtype=torch.int64)
    techniques = Techniques(schedule=schedule, microbatches=4, checkpointing="selective")
    with pytest.raises(LayoutError, match=rf"{schedule}"):
        partition_model(model, transformer_plan(), LAYOUT, techniques, sample)
