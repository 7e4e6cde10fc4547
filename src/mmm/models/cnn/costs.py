"""What the CNN sends over tp.

All its layers are different, so there is no formula for what one of them keeps, and the planner leaves the CNN out.
"""

from __future__ import annotations

from mmm.models.cnn.model import CNNConfig
from mmm.models.costs import Costs, Held, KeptActivations, Setting
from mmm.parallel.collective_bytes import factor


class CNNCosts(Costs):
    """Costs of `mmm.models.cnn.model.CNN`."""

    planned = False

    def kept(self, config: CNNConfig, setting: Setting) -> KeptActivations:
        raise ValueError("no formula for what a CNN's layers keep and pass on")

    def pairs(self, config: CNNConfig) -> int:
        # fc1 by columns, fc2 by rows.
        return 1

    def sent_over_tp(self, config: CNNConfig, setting: Setting, held: Held) -> float:
        # Elements of a sample. fc1 all-reduces the gradient of its input in backward, fc2 its output in forward.
        elements = 0
        if "fc1" in held.modules:
            elements += config.features
        if "fc2" in held.modules:
            elements += config.classes
        return factor("all_reduce", setting.layout.tp) * setting.batch * elements * setting.compute
