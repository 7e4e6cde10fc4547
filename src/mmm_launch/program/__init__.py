"""What each rank runs: CMD taken apart and checked, and the modules that it will import, read as text."""
