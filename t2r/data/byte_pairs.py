"""Words cut by byte-pair codes (Sennrich et al., 2016), as subword-nmt and fastBPE write them."""

import itertools

from t2r.errors import raise_all


class BytePairs:
    """Joins a word's characters by a list of pairs, those that stand first in it first."""

    def __init__(self, codes: str):
        lines = [line.strip(" \r").split(" ") for line in codes.split("\n") if line.strip(" \r")]
        version = lines.pop(0)[-1] if lines and lines[0][0].startswith("#version") else None
        problems = [f"{' '.join(line)!r}" for line in lines if len(line) not in (2, 3)]
        raise_all("byte-pair codes are two pieces a line, with or without a count; these are not:", problems[:10])
        # The end of a word is a mark on its last character; in the oldest files, which name no version, a piece.
        self._mark_is_piece = version in (None, "0.1") and all(len(line) == 2 for line in lines)
        self._ranks = {(left, right): rank for rank, (left, right, *_) in reversed(list(enumerate(lines)))}

    def __call__(self, word: str) -> list[str]:
        """The pieces of a word, of which all but the last end in `@@`."""
        pieces = [*word, "</w>"] if self._mark_is_piece else [*word[:-1], f"{word[-1]}</w>"]
        while len(pieces) > 1:
            first = min(itertools.pairwise(pieces), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if first not in self._ranks:
                break
            joined: list[str] = []
            for piece in pieces:
                if joined and (joined[-1], piece) == first:
                    joined[-1] += piece
                else:
                    joined.append(piece)
            pieces = joined
        last = pieces.pop().removesuffix("</w>") or pieces.pop()
        return [f"{piece}@@" for piece in pieces] + [last]
