"""Benchmarks: decoding, attention and training speed, memory, compilation for TPUs, and their plots."""
