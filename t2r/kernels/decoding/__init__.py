"""Kernels of a decoding step, for models that they suit: five for each layer, or one for all."""
