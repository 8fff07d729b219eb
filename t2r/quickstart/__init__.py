"""The quickstart: a small pretrained transformer made an RNN, measured, and reported on one page."""
