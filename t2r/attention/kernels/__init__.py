"""Attention as Pallas kernels: they never write down what only the next step reads. Each equals a form in plain JAX."""
