"""Translates checkpoints that mmm wrote before December 2026. This file goes in December 2027."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmm.checkpoint.objects import encode

# The row under way of a checkpoint that has none.
NO_ROW = {"steps": 0, "counted": 0.0, "losses": [], "loss_ranks": []}


def as_today(state: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """The ``state`` of a manifest, as today's manifests have it.

    Args:
        state: the state of a manifest, of whatever time.
        current: the objects of the run that resumes, as `mmm.run.state.State.describe` returns them.
    """
    if "row" in state:
        return dict(state)
    # A user's own script wrote it.
    if "objects" in state:
        return {"samples": state["samples"], "objects": state["objects"], "row": NO_ROW}
    row = {
        "steps": state["since"],
        "counted": state["counted"],
        "losses": state["losses"],
        "loss_ranks": state["loss_ranks"],
    }
    # A trainer saved no value of its optimizer's groups: all come from the flags. Names of parameters did not begin
    # with the name of their model.
    groups = [{**group, "values": {}} for group in current["optimizer"]["groups"]]
    objects = {
        "model": {"kind": "model"},
        "optimizer": {**current["optimizer"], "groups": groups, "numbers": {}, "left_out": "model."},
        "scaler": {**current["scaler"], "state": encode(state["scaler"], "scaler", {})},
    }
    return {"samples": None, "objects": objects, "row": row}
