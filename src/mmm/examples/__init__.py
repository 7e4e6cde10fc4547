"""One idea a file, each a runnable module: ``python -m mmm.examples`` lists them."""
