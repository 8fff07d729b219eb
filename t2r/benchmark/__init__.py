"""How fast models decode, how much memory they need, and how to show it."""
