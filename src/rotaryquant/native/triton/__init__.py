"""Triton programs, one file each; `ops/` decides when they run."""
