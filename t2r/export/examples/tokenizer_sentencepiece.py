from sentencepiece import SentencePieceProcessor


def tokenizer(folder):
    model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return model.encode, model.decode
