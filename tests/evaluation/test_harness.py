"""Models in lm-evaluation-harness: what it is told is what a naive computation gives, and what its own models say."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import PROSE, make_model, micro
from t2r.data.chat_template import ChatTemplate
from t2r.data.tokenizer import Hub, SentencePiece, prompt_ids, stop_ids
from t2r.decode.generate import generate_tokens, prefill
from t2r.errors import InputError
from t2r.export import hugging_face
from t2r.model.config import AttentionSpec
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from tests.serve.servers import chat_tokenizer

pytest.importorskip("lm_eval")

MERGED, SOFTMAX = AttentionSpec("merged", "t2r", 8), AttentionSpec()
WORDS = "The lazy fox counts two boats near the old river, and nobody asked why."


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A model of 60 positions whose texts begin with a token."""
    path = tmp_path_factory.mktemp("harness") / "model"
    config = micro(
        vocab_size=300, adaptive_cutoffs=(), positions="learned", max_positions=60, attention=(MERGED, SOFTMAX)
    )
    content = LoadedModel(make_model(config), SentencePiece(tokenizer._model, begin=1), {"history": []})
    model_dir.save(path, content)
    return path, content


def of_kind(kind: str, *arguments: tuple):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def harness_model(path, **options):
    from t2r.evaluation.harness import HarnessModel

    return HarnessModel.create_from_arg_obj({"model": str(path), **options}, {"batch_size": 1, "device": "cuda:0"})


@functools.cache
def compiled(path: Path):
    """The log-probabilities of each next token after each of 60, of one sequence."""
    model = model_dir.load(path).model
    return jax.jit(lambda ids: model.log_probs(model(ids)[0]))


def naive(path: Path, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = [*context, *continuation][-61:-1]
    scores = np.asarray(compiled(path)(jnp.asarray([ids + [0] * (60 - len(ids))])))[0, : len(ids)]
    scores = scores[-len(continuation) :]
    rows = range(len(continuation))
    return float(scores[rows, continuation].sum()), scores.argmax(-1).tolist() == continuation


def test_likelihoods_equal_a_naive_computation(saved):
    """In batches of different lengths; without a context, without a continuation, with more context than positions."""
    path, content = saved
    tokenizer = content.tokenizer
    pairs = [
        ("The lazy", " fox"), (WORDS, " a b"), ("", "The lamp"), ("The lazy", ""), (WORDS * 3, " moves"),
        ("a ", "boat"),
    ]  # fmt: skip
    found = harness_model(path, batch_size=4).loglikelihood(of_kind("loglikelihood", *pairs))
    assert found[3] == (0.0, True), "nothing is certain"
    for (context, continuation), answer in zip(pairs, found, strict=True):
        if not continuation:
            continue
        spaces = len(context) - len(context.rstrip())
        context, continuation = context.rstrip(), context[len(context) - spaces :] + continuation
        before = [1, *tokenizer.encode(context)]
        whole = [1, *tokenizer.encode(context + continuation)]
        expected = naive(path, before, whole[len(before) :])
        assert abs(answer[0] - expected[0]) < 1e-3 and answer[1] == expected[1]
    single = harness_model(path).loglikelihood(of_kind("loglikelihood", *pairs))
    assert np.allclose([score for score, _ in single], [score for score, _ in found], atol=1e-4)


def test_texts_longer_than_the_positions_are_scored_in_windows(saved):
    """Each token once; those of the first window after the begin token, the others after the window's first token."""
    path, content = saved
    long = [1, *content.tokenizer.encode(WORDS * 3)]
    assert 120 < len(long) < 180
    expected = naive(path, [1], long[:60])[0]
    expected += naive(path, long[59:60], long[60:120])[0]
    rest = long[120:]
    expected += naive(path, long[-61 : -len(rest)], rest)[0]
    short = naive(path, [1], [1, *content.tokenizer.encode("The fox")])[0]
    found = harness_model(path, batch_size=2).loglikelihood_rolling(of_kind("", (WORDS * 3,), ("The fox",)))
    assert np.allclose(found, [expected, short], atol=1e-3)


def test_generation_ends_at_the_first_stop_sequence(saved):
    path, content = saved
    model = harness_model(path, batch_size=2)
    prompts = ["The lazy fox", "a", WORDS * 3]
    options = {"until": [], "max_gen_toks": 20, "do_sample": False}
    found = model.generate_until(of_kind("", *((prompt, options) for prompt in prompts)))
    for prompt, text in zip(prompts, found, strict=True):
        ids = prompt_ids(content.tokenizer, content.tokenizer.encode(prompt))[-40:]
        _, (expected,) = generate_tokens(
            content.model, prefill(content.model, [ids], 20), 20, end=stop_ids(content.tokenizer)
        )
        assert text == content.tokenizer.decode(expected)
    stop = found[0][3:5]
    assert len(stop) == 2
    until = {"until": [stop, "never written"], "max_gen_toks": 20}
    assert model.generate_until(of_kind("", (prompts[0], until))) == [found[0].split(stop)[0]]
    sampled = {"max_gen_toks": 20, "do_sample": True, "temperature": 0.9, "top_k": 50}
    assert len(model.generate_until(of_kind("", (prompts[0], sampled)))) == 1


def test_wrong_arguments_are_one_clear_error(saved, saved_translator, tmp_path):
    from t2r.evaluation.harness import HarnessModel, options_of

    path, _ = saved
    for options, message in (
        (dict(model=path, pretrained="a"), "--model_args has pretrained: model t2r takes model=DIR"),
        (dict(), "--model_args=model=DIR is missing"),
        (dict(model=tmp_path / "none"), "give a t2r model directory"),
        (dict(model=saved_translator), "this is a translation model"),
        (dict(model=path, max_length=61), "this model has 60 positions"),
        (dict(model=path, max_length="long"), "max_length=long: give a whole number"),
        (dict(model=path, batch_size=0), "batch_size=0: give a whole number of at least 1"),
        (dict(model=path, dtype="float16"), "dtype=float16: choose float32 or bfloat16"),
        (dict(model=path, device="cuda:7"), "device=cuda:7: JAX has no such device here"),
        (dict(model=path, device="abacus"), "device=abacus: JAX has no such device here"),
        (dict(model=path, seed=-1), "seed=-1: give a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            HarnessModel(**{name: str(value) if name == "model" else value for name, value in options.items()})
    model = harness_model(path)
    with pytest.raises(InputError, match="max_gen_toks=60 leaves no room for a context in max_length=60"):
        model.generate_until(of_kind("", ("a", {"max_gen_toks": 60})))
    with pytest.raises(InputError, match="generation with num_beams is not supported"):
        options_of({"num_beams": 2})
    with pytest.raises(InputError, match="more than max_length=60"):
        model.loglikelihood(of_kind("", ("a", " boat" * 90)))
    for call in (lambda: model.apply_chat_template([]), lambda: model.chat_template(True)):
        with pytest.raises(InputError, match="no chat template: leave out --apply_chat_template"):
            call()
    with pytest.raises(InputError, match="--apply_chat_template=tool_use: leave out the name"):
        model.chat_template("tool_use")


TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/documents.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
{rest}
"""
TASKS = {
    "choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]""",
    "writing": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["er", "."], max_gen_toks: 20, do_sample: false}
metric_list: [{metric: exact_match}]""",
}


def evaluated(folder: Path, model: str, arguments: str, *flags: str) -> tuple[dict[str, dict], dict[str, list]]:
    """What `t2r lm_eval` finds on the tasks in a folder: scores by task and measure, prompts and answers by task."""
    out = folder / f"results_{model}{len(list(folder.glob('results_*')))}"
    tasks = ",".join(f"local_{name}" for name in TASKS)
    command = [sys.executable, "-m", "t2r", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", tasks]
    command += ["--include_path", f"{folder}/tasks", "--batch_size", "3", "--device", "cpu", "--output_path", out]
    command += ["--log_samples"]
    environment = {"HF_HOME": f"{folder}/home", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([*command, *flags], env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    (file,) = out.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    scores = {
        task: {measure: score for measure, score in found.items() if isinstance(score, float)}
        for task, found in results.items()
    }
    return scores, {task: _samples(out, task) for task in results}


def _samples(folder: Path, task: str) -> list[tuple]:
    """Of each document: what the model was given, and what it answered (numbers are written as text)."""
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    documents = sorted(map(json.loads, file.read_text().splitlines()), key=lambda document: document["doc_id"])
    answers = lambda document: [part for answer in document["resps"] for part in answer]  # noqa: E731
    return [(document["arguments"], answers(document)) for document in documents]


def write_tasks(folder: Path) -> None:
    """Tasks of local files."""
    (folder / "tasks").mkdir()
    for name, rest in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(TASK.format(name=f"local_{name}", folder=folder, rest=rest))
    documents = [
        dict(question=line[: 9 * i + 3], choices=[line[9 * i + 3 :][:12], " a lamp", " why"], text=line * (i + 1))
        for i, line in enumerate(PROSE.splitlines()[::60])
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))


@pytest.mark.slow
def test_the_command_gives_what_the_harness_finds_of_the_exported_model(saved, tmp_path):
    """The scores of `--model t2r`, and of `--model hf` with the exported directory."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    path, content = saved
    hugging_face.save(tmp_path / "exported", content)
    write_tasks(tmp_path)
    ours = evaluated(tmp_path, "t2r", f"model={path}")
    assert_equal(ours, evaluated(tmp_path, "hf", f"pretrained={tmp_path}/exported,{OPTIONS}"))


OPTIONS = "trust_remote_code=True,dtype=float32"


def assert_equal(ours: tuple[dict, dict], theirs: tuple[dict, dict]) -> None:
    assert ours[0].keys() == theirs[0].keys() == {f"local_{name}" for name in TASKS}
    for task, found in ours[0].items():
        assert found and found == pytest.approx(theirs[0][task], rel=1e-3)
        for (given, answers), (their_given, their_answers) in zip(ours[1][task], theirs[1][task], strict=True):
            assert given == their_given
            for answer, their_answer in zip(answers, their_answers, strict=True):
                assert _close(answer, their_answer), (task, answer, their_answer)


def _close(ours: str | list, theirs: str | list) -> bool:
    """Whether two answers are the same text, or the same log-probability but for rounding."""
    ours, theirs = (answer[0] if isinstance(answer, list) else answer for answer in (ours, theirs))
    return ours == theirs or float(ours) == pytest.approx(float(theirs), rel=1e-3)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model with a chat template that writes the token which begins every text."""
    from tokenizers import processors

    plain = chat_tokenizer()
    tokens = plain._tokens
    tokens.add_special_tokens(["<s>"])
    begin = tokens.token_to_id("<s>")
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer = Hub(tokens.to_str(), begin, plain.stop, chat_template="{{ bos_token }}" + plain.chat_template)
    config = micro(vocab_size=tokens.get_vocab_size(), adaptive_cutoffs=(), attention=(MERGED, SOFTMAX))
    content = LoadedModel(make_model(config), tokenizer, {"history": []})
    path = tmp_path_factory.mktemp("chat") / "model"
    model_dir.save(path, content)
    return path, content


CONVERSATION = [
    {"role": "system", "content": "Be short."}, {"role": "user", "content": "The lazy fox"},
    {"role": "assistant", "content": " counts"},
]  # fmt: skip


def test_a_conversation_is_what_its_template_writes(chat_model):
    """The token that begins a text is there once; a message that is continued has no end."""
    path, content = chat_model
    model = harness_model(path)
    text = model.apply_chat_template(CONVERSATION[:2])
    assert text == ChatTemplate(content.tokenizer.chat_template, content.tokenizer).text(CONVERSATION[:2])
    assert text.startswith("<s>") and text.endswith("<|im_start|>assistant\n")
    continued = model.apply_chat_template(CONVERSATION, add_generation_prompt=False)
    assert continued == text + " counts"
    begin = content.tokenizer.end
    assert model.tok_encode(text).count(begin) == 1 == model.tok_encode("The lamp").count(begin)
    assert model._prompt(text, 100) == model.tok_encode(text)
    assert model.chat_template(True) == content.tokenizer.chat_template


def test_a_template_without_system_messages_gets_none(chat_model, tmp_path, capsys):
    """As in the harness's own models; it is said once. Names tell templates apart."""
    path, content = chat_model
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    old = content.tokenizer
    new = Hub(old.content, old.end, old.stop, chat_template=refusing + old.chat_template)
    model_dir.save(tmp_path / "model", content._replace(tokenizer=new))
    model = harness_model(tmp_path / "model")
    for _ in range(2):
        assert model.apply_chat_template(CONVERSATION[:2]) == model.apply_chat_template(CONVERSATION[1:2])
    assert capsys.readouterr().err.count("no system role: system messages are left out") == 1
    assert model.tokenizer_name != harness_model(path).tokenizer_name


@pytest.mark.slow
def test_conversations_get_what_the_harness_finds_of_the_exported_model(chat_model, tmp_path):
    """With examples as turns, a system message, and a beginning of the answer."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    path, content = chat_model
    hugging_face.save(tmp_path / "exported", content)
    write_tasks(tmp_path)
    prefixed = (tmp_path / "tasks" / "writing.yaml").read_text() + "gen_prefix: 'So'\n"
    (tmp_path / "tasks" / "writing.yaml").write_text(prefixed)
    arguments = ["--apply_chat_template", "--fewshot_as_multiturn", "true", "--num_fewshot", "2"]
    arguments += ["--system_instruction", "Be short."]
    ours = evaluated(tmp_path, "t2r", f"model={path}", *arguments)
    prompt = ours[1]["local_writing"][0][0]["gen_args_0"]["arg_0"]
    assert prompt.startswith("<s><|im_start|>system\nBe short.") and prompt.endswith("<|im_start|>assistant\nSo")
    assert prompt.count("<|im_start|>user") == 3
    assert_equal(ours, evaluated(tmp_path, "hf", f"pretrained={tmp_path}/exported,{OPTIONS}", *arguments))
