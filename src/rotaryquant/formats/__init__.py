"""What the bytes are: rotations, codebooks, rows and blocks, on numbers alone."""
