"""Byte-pair encoding of words (Sennrich et al., 2016), with codes files of subword-nmt or fastBPE."""

import itertools

from t2r.errors import raise_all


class BytePairs:
    """Splits a word into subwords: merges its characters pair by pair, in the order of the pairs in `codes`."""

    def __init__(self, codes: str):
        lines = [line.strip(" \r").split(" ") for line in codes.split("\n") if line.strip(" \r")]
        version = lines.pop(0)[-1] if lines and lines[0][0].startswith("#version") else None
        problems = [f"{' '.join(line)!r}" for line in lines if len(line) not in (2, 3)]
        raise_all(
            "each line of a byte-pair codes file must be two subwords, optionally with a count; these lines are not:",
            problems[:10],
        )
        # `</w>` marks the end of a word. It is a suffix of the last character, but a symbol of its own in the oldest
        # files (version 0.1 or none).
        self._mark_is_symbol = version in (None, "0.1") and all(len(line) == 2 for line in lines)
        self._ranks = {(left, right): rank for rank, (left, right, *_) in reversed(list(enumerate(lines)))}

    def __call__(self, word: str) -> list[str]:
        """The subwords of a word; all but the last end in `@@`."""
        pieces = [*word, "</w>"] if self._mark_is_symbol else [*word[:-1], f"{word[-1]}</w>"]
        while len(pieces) > 1:
            best = min(itertools.pairwise(pieces), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            merged: list[str] = []
            for piece in pieces:
                if merged and (merged[-1], piece) == best:
                    merged[-1] += piece
                else:
                    merged.append(piece)
            pieces = merged
        last = pieces.pop().removesuffix("</w>") or pieces.pop()
        return [f"{piece}@@" for piece in pieces] + [last]
