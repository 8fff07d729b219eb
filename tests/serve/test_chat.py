"""`t2r chat` as a process: piped messages, a state that is kept, Ctrl-C."""

import json
import signal
import subprocess
import sys
import threading

import pytest

import t2r
from t2r.data.chat_template import find_template
from t2r.decode.generate import generate_tokens, prefill
from t2r.errors import InputError
from t2r.serve.conversation import Conversation
from tests.serve.servers import TEMPLATE, save_pair
from tests.training.runs import ROOT, environment


@pytest.fixture(scope="module")
def rnn(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("chat"))[0]


def start(*arguments: str) -> subprocess.Popen:
    streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-m", "t2r", "chat", *arguments], env=environment(), cwd=ROOT, **streams)


def test_the_state_is_kept_between_turns(rnn):
    """Each turn reads only what is new, and answers what the whole conversation read anew would be answered."""
    conversation, loaded = Conversation(str(rnn)), t2r.load(rnn)
    encode, stop = loaded.tokenizer.encode, loaded.tokenizer.stop
    ids, before = [], "<|im_start|>user\n"
    for message in ("Count the lamps.", "And the boats?", "Why?"):
        new = encode(f"{before}{message}<|im_end|>\n<|im_start|>assistant\n")
        ids += new[1:] if ids and ids[-1] == stop else new
        _, (expected,) = generate_tokens(loaded.model, prefill(loaded.model, [ids], 12), 12, end=stop)
        read = conversation.read
        assert "".join(conversation.answer(message, 12, threading.Event())) == loaded.tokenizer.decode(expected)
        assert conversation.read - read <= len(new) + 1
        ids, before = [*conversation._ids], "<|im_end|>\n<|im_start|>user\n"
    first = "<|im_start|>user\nCount the lamps.<|im_end|>\n<|im_start|>assistant\n"
    conversation.reset()
    assert "".join(conversation.answer("Count the lamps.", 12, threading.Event())) == t2r.generate(loaded, first, 12)
    conversation.close()


@pytest.mark.slow
def test_weights_of_8_bits_answer_what_generate_writes_with_them(rnn):
    out, err = start(f"--model={rnn}", "--temperature=0", "--length=24", "--weights=int8").communicate("Why?\n", 120)
    prompt = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    plain, rounded = t2r.load(rnn), t2r.for_decoding(t2r.load(rnn), "int8")
    assert out.splitlines()[:-1] == t2r.generate(rounded, prompt, 24).splitlines(), err
    assert t2r.generate(plain, prompt, 24) != t2r.generate(rounded, prompt, 24), "rounding makes a difference"


@pytest.mark.slow
def test_messages_may_be_piped(rnn):
    options = [f"--model={rnn}", "--temperature=0", "--length=6"]
    out, err = start(*options).communicate("Count.\n\n/reset\nCount.\n/what\n", timeout=120)
    lines = out.splitlines()
    assert json.loads(lines[-1])["turns"] == 2 and "Traceback" not in err
    assert "(a new conversation)" in lines and "(there is no /what: /reset begins again, Ctrl-D ends)" in lines
    first = out.split("(a new conversation)\n")
    assert first[0].strip() and first[1].startswith(first[0].rstrip("\n"))


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_conversation(rnn):
    # With this seed the first answer is long: hundreds of tokens.
    process = start(f"--model={rnn}", "--temperature=1.5", "--seed=13", "--length=100000")
    process.stdin.write("Count.\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("Count.\n" if process.poll() is None else None, timeout=120)
    assert "Traceback" not in err, err
    assert process.returncode == 0 and json.loads(out.splitlines()[-1])["turns"] == 2


def test_a_template_is_kept_by_conversions(rnn, tmp_path):
    t2r.save(t2r.load(rnn), tmp_path / "copy")
    assert (tmp_path / "copy" / "chat_template.jinja").read_text() == TEMPLATE
    expected = "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n"
    assert (
        find_template(t2r.load(tmp_path / "copy").tokenizer).text([{"role": "user", "content": "Count."}]) == expected
    )
    (tmp_path / "copy" / "chat_template.jinja").unlink()
    assert find_template(t2r.load(tmp_path / "copy").tokenizer) is None


def test_a_model_without_a_template_is_refused(call, tmp_path):
    status, error = call("chat", "--model=builtin:tiny_lm")
    assert status == 2 and "builtin:tiny_lm has no chat template: use `t2r generate`" in error
    (tmp_path / "template").write_text(TEMPLATE)
    status, error = call("chat", "--model=builtin:tiny_lm", f"--chat_template={tmp_path}/template")
    assert status == 2 and "chat needs the tokenizer of a Hugging Face model" in error


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for %}", "not valid Jinja"),
        ("{{ raise_exception('only one user') }}", "refuses these messages: only one user"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
            "more than 10,000,000",
        ),
    ],
)
def test_a_bad_template_is_one_error(template, message, rnn, tmp_path):
    (tmp_path / "template").write_text(template)
    with pytest.raises(InputError, match=message):
        find_template(t2r.load(rnn).tokenizer, str(tmp_path / "template")).text([{"role": "user", "content": "x"}])
