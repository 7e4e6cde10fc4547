"""Draws a run's rows, as pictures and in the terminal."""
