"""One colour for one thing, in every picture: of runs, plans, layouts and the guide. Only data; it imports nothing.

The colours are those of Okabe and Ito, which people who see no red or no green tell apart
(https://jfly.uni-koeln.de/color/). Each is readable on white and on the dark paper below.
"""

from typing import NamedTuple

BLACK, ORANGE, SKY, GREEN = "#22303c", "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, VERMILION, PURPLE = "#f0e442", "#0072b2", "#d55e00", "#cc79a7"
GREY = "#9aa5b1"

# Runs or ranks that share a plot, in this order.
SERIES = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, GREY)

AXES = {
    "pp": PURPLE,
    "dp_replicate": ORANGE,
    "dp_shard": BLUE,
    "cp": GREEN,
    "tp": VERMILION,
    "ep": SKY,
}

# On dark paper: each has a contrast of 4.5 to it, and to what is idle.
AXES_DARK = {
    **AXES,
    "dp_shard": "#3d9be0",
    "cp": "#1db88a",
    "tp": "#ff7352",
    "ep": "#b9e4ff",
}

# docs/runs.md says what these parts of a step are.
STEP_PARTS = {
    "dtd": GREY,
    "dtf": SKY,
    "dtb": BLUE,
    "dto": ORANGE,
    "dtw": VERMILION,
}

MEMORY = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": SKY,
    "logits": VERMILION,
    "gathered": PURPLE,
    "communication": YELLOW,
    "other": GREY,
}


class Theme(NamedTuple):
    """The colours that a picture is drawn on.

    Attributes:
        paper: the background.
        ink: text.
        muted: text and lines that are less important.
        grid: the grid.
        idle: what is idle, or not there.
    """

    paper: str
    ink: str
    muted: str
    grid: str
    idle: str


LIGHT = Theme(paper="#ffffff", ink="#22303c", muted="#66727e", grid="#d9dfe5", idle="#eef1f4")
DARK = Theme(paper="#12181f", ink="#e6ebf0", muted="#9aa5b1", grid="#37424d", idle="#232c35")
THEMES = {"light": LIGHT, "dark": DARK}
