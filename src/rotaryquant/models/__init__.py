"""Facts about model families: what their tensors are for. No forward pass."""
