"""What goes on around a run, a file each: see `mmm.run.hook.Hook`."""
