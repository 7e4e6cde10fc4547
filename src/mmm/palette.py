"""One colour for one thing, in every picture: of runs, plans, layouts and the guide. Data alone; it imports nothing.

The colours are those of Okabe and Ito, which people who see no red or no green tell apart
(https://jfly.uni-koeln.de/color/). Each is readable on white and on the dark paper below.
"""

from typing import NamedTuple

BLACK, ORANGE, SKY, GREEN = "#22303c", "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, VERMILION, PURPLE = "#f0e442", "#0072b2", "#d55e00", "#cc79a7"
GREY = "#9aa5b1"

SERIES = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, GREY)  # of runs or ranks that share a plot, in this order

AXES = {
    "pp": PURPLE,
    "dp_replicate": ORANGE,
    "dp_shard": BLUE,
    "cp": GREEN,
    "tp": VERMILION,
    "ep": SKY,
}

STEP_PARTS = {"dtd": GREY, "dtf": SKY, "dtb": BLUE, "dto": ORANGE, "dtw": VERMILION}  # docs/runs.md says what they are

# Of a pipeline: forward, backward, gradients of inputs, gradients of weights.

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
    """What a picture is drawn on: paper, its text, text and lines that are less important, its grid, and what is idle
    or not there."""

    paper: str
    ink: str
    muted: str
    grid: str
    idle: str


LIGHT = Theme(paper="#ffffff", ink="#22303c", muted="#66727e", grid="#d9dfe5", idle="#eef1f4")
DARK = Theme(paper="#12181f", ink="#e6ebf0", muted="#9aa5b1", grid="#37424d", idle="#232c35")
THEMES = {"light": LIGHT, "dark": DARK}
