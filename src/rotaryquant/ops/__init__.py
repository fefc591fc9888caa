"""One folder an op: its signature, its reference and its kernels."""
