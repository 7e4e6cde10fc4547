"""What happens around a run, one thing in each file: see `mmm.run.hook.Hook`."""
