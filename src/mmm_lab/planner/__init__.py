"""Before the run: which layouts fit, what a rank will hold, send and wait for, how long it takes; the dry run."""
