"""The training loop that the trainers share, the schedule of its learning rate, and what scripts take of it."""
