"""Models for the proof that the package does not have, each in a module with ``PARITY``, and their layouts."""

from pathlib import Path

MATRIX = Path(__file__).with_name("matrix.txt")
# The models beside the built-in ones that parity is proven for.
NAMES = tuple(
    f"{__name__}.{name}" for name in ("plain_gpt", "lora", "regression", "batch_norm", "unet", "encoder", "fno")
)
