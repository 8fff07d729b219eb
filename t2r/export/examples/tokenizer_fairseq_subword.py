import json
from itertools import pairwise


def tokenizer(folder):
    content = json.loads((folder / "subwords.json").read_text("utf-8"))
    words, codes, language = content["words"], content["codes"], content["language"]
    ids, to_words, to_text = {word: i for i, word in enumerate(words)}, str.split, " ".join
    if language:
        from sacremoses import MosesDetokenizer, MosesTokenizer

        to_text, moses = MosesDetokenizer(language).detokenize, MosesTokenizer(language)
        to_words = lambda line: moses.tokenize(line, aggressive_dash_splits=True)  # noqa: E731
    pairs = [line.split(" ") for line in (codes or "").split("\n") if line.strip()]
    version = pairs.pop(0)[-1] if pairs and pairs[0][0].startswith("#version") else None
    # `</w>` marks the end of a word: a symbol of its own in the oldest files, later a part of the last letter.
    separate = version in (None, "0.1") and all(len(pair) == 2 for pair in pairs)
    ranks = {(left, right): rank for rank, (left, right, *_) in reversed(list(enumerate(pairs)))}

    def split(word):  # byte-pair encoding: merges the pair of the lowest rank, again and again
        pieces = [*word, "</w>"] if separate else [*word[:-1], word[-1] + "</w>"]
        while near := [pair for pair in pairwise(pieces) if pair in ranks]:
            best, merged = min(near, key=ranks.get), []
            for piece in pieces:
                if merged and (merged[-1], piece) == best:
                    merged[-1] += piece
                else:
                    merged.append(piece)
            pieces = merged
        last = pieces.pop().removesuffix("</w>") or pieces.pop()
        return [f"{piece}@@" for piece in pieces] + [last]

    def encode(text):
        pieces = []
        for line in text.split("\n"):
            pieces += [piece for word in to_words(line) for piece in (split(word) if codes else [word])] + ["</s>"]
        return [ids.get(piece, ids["<unk>"]) for piece in pieces[:-1]]

    def decode(row):
        pieces = [words[i].replace("</s>", "\n") for i in row if words[i] not in ("<s>", "<pad>")]
        lines = f"{' '.join(pieces)} ".replace("@@ ", "").split("\n")
        return "\n".join(to_text(line.split()) for line in lines)

    return encode, decode
