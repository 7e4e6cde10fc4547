"""Before the run: which layouts fit, what a rank will hold, send and wait for, and how long a step takes."""
