"""Helpers for tests of serving: small models that are quick to compile, and a server in a process of its own."""

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from t2r.data.tokenizer import Hub
from t2r.model.config import AttentionSpec
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from tests.conftest import PROSE, make_model, micro
from tests.training.runs import ROOT, environment

TEMPLATE = """{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_tokenizer() -> Hub:
    """Bytes and some words, with the special tokens of the template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator([PROSE], trainer)
    return Hub(tokens.to_str(), None, 1, chat_template=TEMPLATE)


def save_pair(folder: Path) -> tuple[Path, Path]:
    """(RNN, transformer): random models with a chat template. Their greedy answers never end of themselves."""
    tokenizer, paths = chat_tokenizer(), (folder / "rnn", folder / "transformer")
    for path, spec in zip(paths, (AttentionSpec("merged", "t2r", 8), AttentionSpec())):
        config = micro(vocab_size=300, layers=1, adaptive_cutoffs=(), tied_output=False, attention=(spec,))
        model = make_model(config)
        output = model.embedding.output
        output[...] = output[...].at[tokenizer.stop].set(0.0)  # its logit is 0, and that of some other token more
        model_dir.save(path, LoadedModel(model, tokenizer, {"history": []}))
    return paths


class Running:
    """A server process."""

    def __init__(self, process: subprocess.Popen, url: str):
        self.process, self.url = process, url

    def post(self, body: object, path: str = "/v1/completions") -> tuple[int, dict]:
        """(status, JSON) of a request; `body` may be bytes that are no JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._open(urllib.request.Request(self.url + path, content))

    def get(self, path: str) -> tuple[int, dict]:
        return self._open(urllib.request.Request(self.url + path))

    def _open(self, request) -> tuple[int, dict]:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                text, status = response.read().decode(), response.status
        except urllib.error.HTTPError as error:
            text, status = error.read().decode(), error.code
        return status, json.loads(text) if text.startswith(("{", "[")) else {"text": text}


@contextlib.contextmanager
def server(*arguments: str, program: Sequence[str] = ()):
    """A running `t2r serve`, or a program (Python, and arguments of its own) that calls it with these arguments."""
    program = ["-c", *program] if program else ["-m", "t2r", "serve", "--port=0"]
    command = [sys.executable, *program, *arguments]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=environment(), cwd=ROOT, **streams)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"on (http://\S+)", line):
                yield Running(process, found[1])
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.communicate()
