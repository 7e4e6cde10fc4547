"""Pictures and terminal plots of a run's rows."""
