"""Data sets of images, and batches of them."""
