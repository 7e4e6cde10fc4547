"""Verifies an unedited script: runs it on one rank and on several, as torchrun would, and compares the two."""
