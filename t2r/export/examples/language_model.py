"""Goes on from a text without t2r, always with the likeliest token: python example.py "Once upon a time" 50"""

import json
import sys
from pathlib import Path

import jax
from safetensors.flax import load_file
from tokenizer_sentencepiece import tokenizer

here = Path(__file__).parent
about, weights = json.loads((here / "export.json").read_text("utf-8")), load_file(here / "model.safetensors")
start, step = (jax.export.deserialize((here / f"{name}.stablehlo").read_bytes()).call for name in ("start", "step"))
step, texts = jax.jit(step, donate_argnums=1), about["batch"] or 1
(encode, decode), ids = tokenizer(here), about["tokenizer"]
prompt, length = [*ids["before"], *encode(sys.argv[1])] or [ids["end"]], int(sys.argv[2])
if len(prompt) + length > (about["longest"] or sys.maxsize):
    sys.exit(f"{len(prompt)} tokens and {length} more: this model was exported for {about['longest']}")

state = start(weights, jax.numpy.zeros(texts, "int32"))
for token in prompt:
    logits, state = step(weights, state, jax.numpy.full(texts, token, "int32"))
written = [int(logits[0].argmax())]
while len(written) < length and written[-1] not in ids["stops"]:
    logits, state = step(weights, state, jax.numpy.full(texts, written[-1], "int32"))
    written.append(int(logits[0].argmax()))
print(decode(written), written, sep="\n")
