"""Counts the bytes that ranks send, and computes them by formula."""
