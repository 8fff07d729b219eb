"""Models of other libraries → model directories: tables of names, and what each config field means."""
