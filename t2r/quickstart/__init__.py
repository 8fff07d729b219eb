"""The quickstart: converts a small pretrained transformer into an RNN, measures it, and writes an HTML report."""
