"""What is compiled: C++ sources in `cpu/`, and Triton programs in `triton/`, which only `ops/` runs."""
