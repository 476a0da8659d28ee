"""Saving and loading all state of a run."""
