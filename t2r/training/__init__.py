"""Training: from a config to a model directory."""
