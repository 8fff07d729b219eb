"""One file per command of `t2r`: it defines flags, prints a table, and returns the result, which is printed as JSON."""
