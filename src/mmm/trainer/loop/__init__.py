"""The training loop that the trainers share, and the parts of it that scripts take."""
