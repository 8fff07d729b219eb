"""Chat templates: the text in which a model was trained to see a conversation, as a Jinja program."""

import datetime
import json
from pathlib import Path
from typing import Any

from t2r.data.tokenizer import Hub, Tokenizer
from t2r.errors import InputError
from t2r.extras import require
from t2r.files import read_file

MOST_CHARACTERS = 10_000_000  # of a rendered conversation: a template may repeat without end

Message = dict[str, str]  # {"role": ..., "content": ...}


class ChatTemplate:
    """Renders conversations; templates come with models from anywhere, so they run in Jinja's sandbox."""

    def __init__(self, source: str, tokenizer: Hub):
        self.source, self._tokenizer = source, tokenizer
        self._tokens = {"bos_token": tokenizer.piece(tokenizer.end), "eos_token": tokenizer.piece(tokenizer.stop)}
        sandbox = require("jinja2.sandbox", "serve")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # Jinja raises many kinds
            raise InputError(f"the chat template is not valid Jinja ({_short(error)}): give another") from None

    def text(self, messages: list[Message], *, answer_follows: bool = True) -> str:
        """The conversation as text; with `answer_follows` up to where the model's answer begins."""
        try:
            parts = self._template.generate(
                messages=messages, add_generation_prompt=answer_follows, tools=None, documents=None, **self._tokens
            )
            text = ""
            for part in parts:
                text += part
                if len(text) > MOST_CHARACTERS:
                    raise InputError(f"the chat template writes more than {MOST_CHARACTERS:,} characters")
            return text
        except InputError:
            raise
        except Exception as error:  # a template may do anything
            raise InputError(f"the chat template refuses these messages: {_short(error)}") from None

    def text_to_continue(self, messages: list[Message]) -> str:
        """The conversation up to the end of its last message, which the model continues."""
        text, last = self.text(messages, answer_follows=False), messages[-1]["content"].strip()
        if last not in text:
            raise InputError("the chat template changes the last message: it cannot be continued")
        return text[: text.rindex(last) + len(last)]

    def ids(self, messages: list[Message]) -> list[int]:
        """The conversation as tokens; the template writes special tokens, also the first one, itself."""
        return self._tokenizer.encode(self.text(messages)) or [self._tokenizer.end]


def _refuse(message: str) -> None:
    raise InputError(f"the chat template refuses these messages: {message}")


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def find_template(tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate | None:
    """The template in the file `given`, or the one that the model was imported with; None if there is none."""
    if given:
        source = read_file(Path(given), "give a file with a Jinja template")
        if not isinstance(tokenizer, Hub):
            raise InputError(
                f"--chat_template={given}: chat needs the tokenizer of a Hugging Face model, which this model does not "
                "have: use `t2r generate`, or /v1/completions of a server"
            )
    else:
        source = getattr(tokenizer, "chat_template", None)
    return None if source is None else ChatTemplate(source, tokenizer)


def content_text(content: Any) -> str | None:
    """The text of a message's content: a string, or a list of text parts; None if it is something else."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return None
