"""Traces of ranks."""
