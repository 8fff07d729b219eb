"""Generation and translation: prefill in chunks, then a scan over decoding steps; the state is a pytree."""
