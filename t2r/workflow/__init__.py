"""One command from a transformer to a finetuned RNN: import, swap, train, merge, measure, report."""
