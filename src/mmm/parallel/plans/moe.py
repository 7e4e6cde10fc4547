"""How the Transformer with routed experts is cut: as `transformer` says."""

from mmm.parallel.plans.transformer import transformer_plan as moe_plan

__all__ = ["moe_plan"]
