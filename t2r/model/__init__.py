"""The transformer models, their configs, parameters and losses."""
