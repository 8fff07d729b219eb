"""A model for programs that do not have this package: arrays with documented names, and StableHLO."""
