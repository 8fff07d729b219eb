"""Evaluation: perplexity, BLEU, and logits for comparison with other libraries."""
