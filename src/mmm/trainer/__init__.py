"""What the examples and trainers share: options, one run's life, optimizers."""
