"""Text → tokens → batches."""
