"""How each model is parallelized: one file a model."""
