"""Checkpoints that mmm wrote before December 2026, as the ones of today say it. This file goes in December 2027."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmm.checkpoint.objects import encode

NO_ROW = {"steps": 0, "counted": 0.0, "losses": [], "loss_ranks": []}


def as_today(state: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """The ``state`` of a manifest, as today's have it.

    Args:
        state: of a manifest, of whatever time.
        here: the objects of the run that goes on, as of `mmm.run.state.State.describe`.
    """
    if "row" in state:
        return dict(state)
    if "objects" in state:  # of a script of one's own
        return {"samples": state["samples"], "objects": state["objects"], "row": NO_ROW}
    row = {
        "steps": state["since"],
        "counted": state["counted"],
        "losses": state["losses"],
        "loss_ranks": state["loss_ranks"],
    }
    # A trainer kept no number of its optimizer: all come from the flags. Of one model, no parameter's name had it.
    groups = [{**group, "values": {}} for group in here["optimizer"]["groups"]]
    objects = {
        "model": {"kind": "model"},
        "optimizer": {**here["optimizer"], "groups": groups, "numbers": {}, "left_out": "model."},
        "scaler": {**here["scaler"], "state": encode(state["scaler"], "scaler", {})},
    }
    return {"samples": None, "objects": objects, "row": row}
