"""How each model is cut: one file a model."""
