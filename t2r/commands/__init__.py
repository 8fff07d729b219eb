"""One file per command of `python -m t2r`: flags in, a table and a result out."""
