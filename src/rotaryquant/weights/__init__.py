"""Checkpoints on disk: what their headers say, before anything is loaded."""
