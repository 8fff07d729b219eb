"""Kernels of a decoding step on a GPU: five for each layer, or for some models one for all layers."""
