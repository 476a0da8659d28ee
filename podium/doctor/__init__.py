"""What went wrong in a run, from what its folder holds."""
