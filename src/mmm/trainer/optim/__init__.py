"""Optimizers, and the schedule of their learning rate."""
