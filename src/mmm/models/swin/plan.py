"""How the Swin is sharded.

Over tp as the ViT (`mmm.models.vit.plan`), whose blocks have the same matrices. Each rank has some of the heads, and
computes their attention in all windows. Rotary positions and the mask are the same for every head, so nothing is sent
for them.

Over cp by the rows of its field (``cp_style space``). A rank's strip need not be whole windows, and a shifted window
has rows of two ranks, so attention moves rows there and back. With 16 rows, windows of 4, shifted by 2, on two ranks::

    rows of a rank     0 1 2 3 4 5 6 7  |  8 9 10 11 12 13 14 15
      │ take
      ▼
    whole windows      2 3 4 5  6 7 8 9 |  10 11 12 13  14 15 0 1      the last one has both ends of the field
      │ attention, then take
      ▼
    rows of a rank     0 1 2 3 4 5 6 7  |  8 9 10 11 12 13 14 15
"""

from __future__ import annotations

from dataclasses import replace

from mmm.models.rules import check_by
from mmm.models.swin.model import SwinConfig, WindowAttention
from mmm.models.vit.plan import vit_plan, vit_rules
from mmm.parallel.cp.space.windows import shifted_windows
from mmm.parallel.plan import Field, Plan


def swin_plan(config: SwinConfig) -> Plan:
    """The plan of `mmm.models.swin.model.Swin`, of these sizes."""
    size = config.image_size
    return replace(
        vit_plan(),
        refused={"ep": "the Swin has no experts"},
        check=check_by(vit_rules),
        space=Field(
            (config.channels, size, size),
            styles={WindowAttention: shifted_windows},
            # Every rank computes the logits.
            targets=None,
        ),
    )
