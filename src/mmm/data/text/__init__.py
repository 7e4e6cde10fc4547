"""Text as tokens: files, tokenizers, sequences and their batches."""
