import json

from sentencepiece import SentencePieceProcessor


def tokenizer(folder):
    model = SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    ids = json.loads((folder / "pieces.json").read_text("utf-8"))
    pieces = {i: piece for piece, i in ids.items() if piece not in ("</s>", "<pad>")}

    def encode(text):
        return [ids.get(piece, ids["<unk>"]) for piece in model.encode(text, out_type=str)]

    return encode, lambda row: "".join(pieces.get(i, "") for i in row).replace("\u2581", " ").strip()
