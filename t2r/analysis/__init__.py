"""What conversion does to attention: distances to the transformer, entropy, feature maps; figures and a page."""
