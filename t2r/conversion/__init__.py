"""Conversion of a pretrained transformer into an RNN: the swap, attention transfer, and the merge."""
