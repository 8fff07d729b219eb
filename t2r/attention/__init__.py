"""Softmax attention, linear attention, and the modules that hold them."""
