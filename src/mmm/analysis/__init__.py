"""What measures and predicts."""
