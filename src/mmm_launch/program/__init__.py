"""What each rank runs: CMD is taken apart and checked, and its source is read for the modules that it imports."""
