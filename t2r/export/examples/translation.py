"""Translates a sentence without t2r, always with the likeliest token: python example.py "forty-two" """

import json
import sys
from pathlib import Path

import jax
from safetensors.flax import load_file
from tokenizer_sentencepiece import tokenizer

here = Path(__file__).parent
about, weights = json.loads((here / "export.json").read_text("utf-8")), load_file(here / "model.safetensors")
read, step = (jax.export.deserialize((here / f"{name}.stablehlo").read_bytes()).call for name in ("encode", "step"))
step, texts = jax.jit(step, donate_argnums=1), about["batch"] or 1
source, target = about["tokenizer"]["source"], about["tokenizer"]["target"]
encode, decode = tokenizer(here / source["folder"])[0], tokenizer(here / target["folder"])[1]
sentence = [*source["before"], *encode(sys.argv[1]), *source["after"]]
length = min(2 * len(sentence) + 16, about["longest"] or sys.maxsize)

state = read(weights, jax.numpy.array([sentence] * texts, "int32"))
(*before, token), written = target["start"], []
for each in before:
    state = step(weights, state, jax.numpy.full(texts, each, "int32"))[1]
while len(written) < length and written[-1:] != [target["stop"]]:
    logits, state = step(weights, state, jax.numpy.full(texts, token, "int32"))
    written.append(token := int(logits[0].argmax()))
print(decode(written), written, sep="\n")
