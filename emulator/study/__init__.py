"""Many jobs, and the arithmetic before any."""
