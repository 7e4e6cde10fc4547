"""How the Swin is sharded over tp: like the ViT (`mmm.models.vit.plan`), whose blocks have the same matrices.

Each rank has some of the heads, and computes their attention in all windows. Rotary positions and the mask are the same
for every head, so nothing is sent for them.
"""

from __future__ import annotations

from dataclasses import replace

from mmm.models.rules import check_by
from mmm.models.swin.model import SwinConfig
from mmm.models.vit.plan import vit_plan, vit_rules
from mmm.parallel.plan import Plan


def swin_plan(config: SwinConfig | None = None) -> Plan:
    """The plan of `mmm.models.swin.model.Swin`, of any size."""
    return replace(
        vit_plan(),
        refused={"cp": "the Swin's field is not sharded", "ep": "the Swin has no experts"},
        check=check_by(vit_rules),
    )
