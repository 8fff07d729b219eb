"""Models on disk: directories of a config, weights, a tokenizer and their provenance."""
