"""The bubble of a pipeline: measured, replayed, and as a picture."""
