from tokenizers import Tokenizer


def tokenizer(folder):
    model = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: model.encode(text, add_special_tokens=False).ids, model.decode
