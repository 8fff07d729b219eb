"""The tokenizer of this model, for `transformers`: it gives exactly the tokens that the model was trained with."""

import json
import shutil
from pathlib import Path

from tokenizer_sentencepiece import tokenizer
from transformers import PreTrainedTokenizer


class T2RTokenizer(PreTrainedTokenizer):
    """`tokenizer_t2r.json` has for source and target (one and the same in a language model) the tokens in the order of
    their ids, those before and after a text, special ones, and the folder of the other files."""

    vocab_files_names = FILES  # replaced by the files of this model
    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, sides_file, **kwargs):
        self.folder = Path(sides_file).parent
        sides = json.loads(Path(sides_file).read_text("utf-8"))
        self.sides = {name: Side(self.folder / side["folder"], side) for name, side in sides.items()}
        self.side = self.sides["source"]
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.side.tokens)

    def get_vocab(self):
        return dict(self.side.ids)

    def _switch_to_input_mode(self):
        self.side = self.sides["source"]

    def _switch_to_target_mode(self):  # of `text_target=`
        self.side = self.sides["target"]

    def tokenize(self, text, **kwargs):
        return [self.side.tokens[i] for i in self.side.encode(text)]

    def _convert_token_to_id(self, token):
        return self.side.ids.get(token)

    def _convert_id_to_token(self, index):
        return self.side.tokens[index]

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [*self.side.before, *token_ids_0, *(token_ids_1 or []), *self.side.after]

    def convert_tokens_to_string(self, tokens):
        target = self.sides["target"]
        return target.decode([target.ids[token] for token in tokens])

    def _decode(self, token_ids, skip_special_tokens=False, **kwargs):
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        target = self.sides["target"]
        if skip_special_tokens:
            return target.decode([i for i in ids if i not in target.special])
        text, ordinary = "", []
        for i in ids:
            if i in target.special:
                text, ordinary = text + target.decode(ordinary) + target.tokens[i], []
            else:
                ordinary.append(i)
        return text + target.decode(ordinary)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        copies = []
        for name in self.vocab_files_names.values():
            copy = Path(save_directory) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copies.append(str(shutil.copyfile(self.folder / name, copy)))
        return tuple(copies)


class Side:
    """The tokenizer of one language."""

    def __init__(self, folder, side):
        self.encode, self.decode = tokenizer(folder)
        self.tokens, self.before, self.after = side["tokens"], side["before"], side["after"]
        self.special = set(side["special"])
        self.ids = {token: i for i, token in enumerate(self.tokens)}
