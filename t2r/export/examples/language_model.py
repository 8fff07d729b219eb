"""Greedy generation from a prompt, without t2r: python example.py "Once upon a time" 50"""

import json
import sys
from pathlib import Path

import jax
from safetensors.flax import load_file
from tokenizer_sentencepiece import tokenizer

if len(sys.argv) != 3 or not sys.argv[2].isdigit():
    sys.exit('usage: python example.py PROMPT TOKENS, such as: python example.py "Once upon a time" 50')
folder = Path(__file__).parent
about, weights = json.loads((folder / "export.json").read_text("utf-8")), load_file(folder / "model.safetensors")
start, step = (jax.export.deserialize((folder / f"{name}.stablehlo").read_bytes()).call for name in ("start", "step"))
step, batch = jax.jit(step, donate_argnums=1), about["batch"] or 1
(encode, decode), ids = tokenizer(folder), about["tokenizer"]
prompt, length = [*ids["before"], *encode(sys.argv[1])] or [ids["end"]], int(sys.argv[2])
if len(prompt) + length > (about["longest"] or sys.maxsize):
    sys.exit(
        f"{len(prompt)} tokens of prompt and {length} more: this model was exported for {about['longest']} in total"
    )

state = start(weights, jax.numpy.zeros(batch, "int32"))
for token in prompt:
    logits, state = step(weights, state, jax.numpy.full(batch, token, "int32"))
generated = [int(logits[0].argmax())]
while len(generated) < length and generated[-1] not in ids["stops"]:
    logits, state = step(weights, state, jax.numpy.full(batch, generated[-1], "int32"))
    generated.append(int(logits[0].argmax()))
print(decode(generated), generated, sep="\n")
