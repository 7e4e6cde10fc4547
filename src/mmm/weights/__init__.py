"""A model's weights in and out: Hugging Face's safetensors, GGUF, and this package's own checkpoints."""
