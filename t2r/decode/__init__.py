"""Generation: prefill in chunks, then a scan, from a state that is a plain value."""
