"""Hugging Face transformers: a packed cache, its attention and its masks, through public extension points."""
