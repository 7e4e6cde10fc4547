"""The plan of the Transformer with routed experts, under the name by which the proof finds it: `transformer`'s."""

from mmm.parallel.plans.transformer import transformer_plan as moe_plan

__all__ = ["moe_plan"]
