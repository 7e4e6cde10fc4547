"""A model's weights in and out: Hugging Face's safetensors, and this package's own checkpoints."""
