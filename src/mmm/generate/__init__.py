"""Text from a language model, and models that start from weights on disk."""
