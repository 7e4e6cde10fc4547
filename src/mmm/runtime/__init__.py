"""One rank's life: who am I, process group, device, log, clock, shutdown."""
