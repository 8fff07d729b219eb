"""From a pretrained transformer to an RNN, and to and from disk."""
