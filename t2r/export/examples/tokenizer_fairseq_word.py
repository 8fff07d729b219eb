def tokenizer(folder):
    words = (folder / "dictionary.txt").read_text("utf-8").split("\n")
    ids = {word: i for i, word in enumerate(words)}

    def encode(text):
        return [ids.get(word, ids["<unk>"]) for word in text.replace("\n", " </s> ").split()]

    return encode, lambda row: " ".join("\n" if words[i] == "</s>" else words[i] for i in row)
