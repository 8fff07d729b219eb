"""Greedy translation of a sentence, without t2r: python example.py "forty-two" """

import json
import sys
from pathlib import Path

import jax
from safetensors.flax import load_file
from tokenizer_sentencepiece import tokenizer

if len(sys.argv) != 2:
    sys.exit('usage: python example.py SENTENCE, such as: python example.py "forty-two"')
folder = Path(__file__).parent
about, weights = json.loads((folder / "export.json").read_text("utf-8")), load_file(folder / "model.safetensors")
encode_source, step = (
    jax.export.deserialize((folder / f"{name}.stablehlo").read_bytes()).call for name in ("encode", "step")
)
step, batch = jax.jit(step, donate_argnums=1), about["batch"] or 1
source, target = about["tokenizer"]["source"], about["tokenizer"]["target"]
encode, decode = tokenizer(folder / source["folder"])[0], tokenizer(folder / target["folder"])[1]
sentence = [*source["before"], *encode(sys.argv[1]), *source["after"]]
length = min(2 * len(sentence) + 16, about["longest"] or sys.maxsize)

state = encode_source(weights, jax.numpy.array([sentence] * batch, "int32"))
(*leading, token), generated = target["start"], []
for start in leading:
    state = step(weights, state, jax.numpy.full(batch, start, "int32"))[1]
while len(generated) < length and generated[-1:] != [target["stop"]]:
    logits, state = step(weights, state, jax.numpy.full(batch, token, "int32"))
    generated.append(token := int(logits[0].argmax()))
print(decode(generated), generated, sep="\n")
