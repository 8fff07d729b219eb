"""Transformers that carry the attention."""
