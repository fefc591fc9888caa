"""The KV cache of one layer: exact rows, packed blocks, and the rules between them."""
