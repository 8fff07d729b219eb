"""Tiny fairseq checkpoints, written without torch, and a reference implementation of their models in NumPy."""

import io
import itertools
import math
import pickle
import zipfile
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from t2r.importers.torch_file import MAGIC, TYPES


class Global(NamedTuple):
    """A global name in a pickle, such as a class; it need not exist."""

    module: str
    name: str


class Call(NamedTuple):
    """A call in a pickle, and the state that is then set on the result."""

    function: Global
    arguments: tuple = ()
    state: Any = None


class Storage(NamedTuple):
    array: np.ndarray
    key: str


class Writer(pickle._Pickler):
    """Writes arrays as torch writes tensors: several may share a storage and stride through it."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def __init__(self, file):
        super().__init__(file, 2)
        self.storages: dict[int, Storage] = {}

    def persistent_id(self, obj):
        if type(obj) is not Storage:
            return None
        kind = next(name for name, dtype in TYPES.items() if np.dtype(dtype) == obj.array.dtype)
        return "storage", Global("torch", f"{kind}Storage"), obj.key, "cpu", obj.array.size

    def save_global_name(self, name: Global) -> None:
        self.write(f"c{name.module}\n{name.name}\n".encode())

    def save_call(self, call: Call) -> None:
        self.save(call.function)
        self.save(call.arguments)
        self.write(pickle.REDUCE)
        if call.state is not None:
            self.save(call.state)
            self.write(pickle.BUILD)

    def save_array(self, array: np.ndarray) -> None:
        base = array
        while base.base is not None:
            base = base.base
        storage = self.storages.setdefault(id(base), Storage(base, str(len(self.storages))))
        offset = (array.ctypes.data - base.ctypes.data) // array.itemsize
        steps = tuple(step // array.itemsize for step in array.strides)
        rebuild = Global("torch._utils", "_rebuild_tensor_v2")
        self.save_call(Call(rebuild, (storage, offset, array.shape, steps, False, OrderedDict())))

    dispatch |= {Global: save_global_name, Call: save_call, np.ndarray: save_array}


def write(path, content: Any, *, legacy: bool = False) -> None:
    """Writes a file as torch.save does; `legacy`: as before torch 1.6."""
    stream = io.BytesIO()
    writer = Writer(stream)
    writer.dump(content)
    storages = writer.storages.values()
    if not legacy:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", stream.getvalue())
            for array, key in storages:
                archive.writestr(f"archive/data/{key}", array.tobytes())
        return
    with path.open("wb") as file:
        for value in (MAGIC, 1001, {"little_endian": True}):
            pickle.dump(value, file, 2)
        file.write(stream.getvalue())
        pickle.dump([key for _, key in storages], file, 2)
        for array, _ in storages:
            file.write(array.size.to_bytes(8, "little") + array.tobytes())


def namespace(**settings) -> Call:
    return Call(Global("argparse", "Namespace"), (), settings)


def omegaconf(value: Any) -> Any:
    """A dictionary as omegaconf objects, as older versions of fairseq pickle it."""
    if isinstance(value, dict):
        content = {name: omegaconf(item) for name, item in value.items()}
        kind = Global("fairseq.dataclass.configs", "CommonConfig")
        return Call(
            Global("omegaconf.dictconfig", "DictConfig"), (), {"_metadata": {"type": kind}, "_content": content}
        )
    return Call(Global("omegaconf.nodes", "AnyNode"), (), {"_metadata": Global("typing", "Any"), "_val": value})


def dictionary(path, words: list[str]) -> None:
    """Writes a fairseq dictionary: one word and its count per line."""
    path.write_text("".join(f"{word} {1000 - i}\n" for i, word in enumerate(words)), "utf-8")


LM = dict(
    arch="transformer_lm_wiki103", decoder_embed_dim=16, decoder_ffn_embed_dim=24, decoder_layers=2,
    decoder_attention_heads=2, decoder_normalize_before=True, dropout=0.1, add_bos_token=False,
    character_embeddings=False, decoder_input_dim=16, decoder_output_dim=16,
)  # fmt: skip
ADAPTIVE = dict(
    LM, adaptive_input=True, adaptive_input_cutoff="12,30", adaptive_softmax_cutoff="12,30", adaptive_input_factor=4.0,
    adaptive_softmax_factor=4.0, tie_adaptive_weights=True, tie_adaptive_proj=True,
)  # fmt: skip
MT = dict(
    arch="transformer_wmt_en_de", source_lang="en", target_lang="de", encoder_embed_dim=16, encoder_ffn_embed_dim=24,
    encoder_layers=1, encoder_attention_heads=2, encoder_normalize_before=False, decoder_embed_dim=16,
    decoder_ffn_embed_dim=24, decoder_layers=2, decoder_attention_heads=2, decoder_normalize_before=False,
)  # fmt: skip
VOCABULARY = 44


def weights(c: dict, *, source: int = VOCABULARY, positions: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights with fairseq's current names; tied weights are one array under two names."""
    rng = np.random.default_rng(seed)
    width, inner = c["decoder_embed_dim"], c["decoder_ffn_embed_dim"]
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32) * 0.3  # noqa: E731
    arrays = {"decoder.version": np.full(1, 3, np.float32)}

    def norm(name: str) -> None:
        arrays[f"{name}.weight"], arrays[f"{name}.bias"] = 1 + normal(width), normal(width)

    for side in ("encoder", "decoder") if "encoder_layers" in c else ("decoder",):
        for i in range(c[f"{side}_layers"]):
            layer = f"{side}.layers.{i}"
            both = side == "decoder" and "encoder_layers" in c
            for name in ("self_attn", "encoder_attn") if both else ("self_attn",):
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    arrays[f"{layer}.{name}.{part}.weight"] = normal(width, width)
                    arrays[f"{layer}.{name}.{part}.bias"] = normal(width)
                norm(f"{layer}.{name}_layer_norm")
            arrays |= {f"{layer}.fc1.weight": normal(inner, width), f"{layer}.fc1.bias": normal(inner)}
            arrays |= {f"{layer}.fc2.weight": normal(width, inner), f"{layer}.fc2.bias": normal(width)}
            norm(f"{layer}.final_layer_norm")
        if c[f"{side}_normalize_before"] and not c.get("adaptive_input"):
            norm(f"{side}.layer_norm")
        if c.get("layernorm_embedding"):
            norm(f"{side}.layernorm_embedding")
        if positions:
            arrays[f"{side}.embed_positions.weight"] = normal(positions + 2, width)
        else:
            arrays[f"{side}.embed_positions._float_tensor"] = normal(1)
    if c.get("adaptive_input"):
        head = "decoder.adaptive_softmax"
        for i, (low, high) in enumerate(itertools.pairwise((0, 12, 30, VOCABULARY))):
            band, size = f"decoder.embed_tokens.embeddings.{i}", width // 4**i
            arrays |= {f"{band}.0.weight": normal(high - low, size), f"{band}.1.weight": normal(width, size)}
            if i:
                arrays[f"{head}.tail.{i - 1}.0.weight"] = arrays[f"{band}.1.weight"]
                arrays[f"{head}.tail.{i - 1}.2.weight"] = arrays[f"{band}.0.weight"]
        arrays[f"{head}.head.word_proj.weight"] = arrays["decoder.embed_tokens.embeddings.0.0.weight"]
        arrays[f"{head}.head.class_proj.weight"] = normal(2, width)
        arrays |= {f"{head}.head._float_tensor": normal(1), f"{head}.version": np.ones(1, np.int64)}
        return arrays
    table = arrays["decoder.embed_tokens.weight"] = normal(VOCABULARY, width)
    shared = c.get("share_all_embeddings")
    if "encoder_layers" in c:
        arrays["encoder.embed_tokens.weight"] = table if shared else normal(source, width)
    tied = shared or c.get("share_decoder_input_output_embed")
    arrays["decoder.output_projection.weight"] = table if tied else normal(VOCABULARY, width)
    return arrays


def old_names(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as old versions of fairseq wrote them: fused projections, numbered norms, tied tables only once."""
    old = {}
    for name, array in arrays.items():
        layer, _, last = name.rpartition(".")
        if layer.endswith(("q_proj", "k_proj", "v_proj")):
            attention = layer[: -len(".q_proj")]
            parts = [arrays[f"{attention}.{which}_proj.{last}"] for which in "qkv"]
            old[f"{attention}.in_proj_{last}"] = np.concatenate(parts)
            continue
        norms = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
        norms = norms[::2] if name.startswith("encoder") else norms
        for i, norm in enumerate(norms if ".layers." in name else []):
            name = name.replace(norm, f"layer_norms.{i}")
        if name == "decoder.output_projection.weight":
            if array is arrays["decoder.embed_tokens.weight"]:
                continue
            name = "decoder.embed_out"
        if name != "decoder.version":
            old[name] = array
    return old


class Reference:
    """A plain float64 implementation of these models."""

    def __init__(self, c: dict, arrays: dict[str, np.ndarray]):
        self.c, self.w = c, {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        self.before, self.heads = c["decoder_normalize_before"], c["decoder_attention_heads"]

    def norm(self, x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def attend(self, x, source, name, causal=False):
        q, k, v = (self.linear(y, f"{name}.{p}_proj") for y, p in ((x, "q"), (source, "k"), (source, "v")))
        out, size = np.zeros_like(q), q.shape[1] // self.heads
        for head, i in itertools.product(range(self.heads), range(len(x))):
            part, last = slice(head * size, (head + 1) * size), i + 1 if causal else len(source)
            scores = np.exp(k[:last, part] @ q[i, part] / math.sqrt(size))
            out[i, part] = scores / scores.sum() @ v[:last, part]
        return self.linear(out, f"{name}.out_proj")

    def feedforward(self, x, layer):
        hidden = self.linear(x, f"{layer}.fc1")
        if self.c.get("activation_fn") == "gelu":
            hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        return self.linear(np.maximum(hidden, 0) if "activation_fn" not in self.c else hidden, f"{layer}.fc2")

    def embed(self, ids, side):
        width = self.c["decoder_embed_dim"]
        if self.c.get("adaptive_input"):
            vectors, bounds = [], (0, 12, 30, VOCABULARY)
            for token in ids:
                band = next(i for i in range(3) if token < bounds[i + 1])
                name = f"decoder.embed_tokens.embeddings.{band}"
                vectors.append(self.w[f"{name}.1.weight"] @ self.w[f"{name}.0.weight"][token - bounds[band]])
            x = np.array(vectors)
        else:
            x = self.w[f"{side}.embed_tokens.weight"][ids]
        x = x if self.c.get("no_scale_embedding") else x * math.sqrt(width)
        if f"{side}.embed_positions.weight" in self.w:
            x = x + self.w[f"{side}.embed_positions.weight"][2 : 2 + len(ids)]
        else:
            rates = np.exp(-math.log(10_000) / (width // 2 - 1) * np.arange(width // 2))
            angles = (np.arange(len(ids)) + 2)[:, None] * rates
            x = x + np.concatenate([np.sin(angles), np.cos(angles)], 1)
        return self.norm(x, f"{side}.layernorm_embedding") if self.c.get("layernorm_embedding") else x

    def stack(self, ids, side, source=None):
        x = self.embed(ids, side)
        for i in range(self.c[f"{side}_layers"]):
            layer = f"{side}.layers.{i}"
            branches = {
                "self_attn_layer_norm": lambda y: self.attend(y, y, f"{layer}.self_attn", side == "decoder"),  # noqa: B023
                "encoder_attn_layer_norm": lambda y: self.attend(y, source, f"{layer}.encoder_attn"),  # noqa: B023
                "final_layer_norm": lambda y: self.feedforward(y, layer),  # noqa: B023
            }
            if source is None:
                del branches["encoder_attn_layer_norm"]
            for name, branch in branches.items():
                norm = f"{layer}.{name}"
                x = x + branch(self.norm(x, norm)) if self.before else self.norm(x + branch(x), norm)
        return self.norm(x, f"{side}.layer_norm") if f"{side}.layer_norm.weight" in self.w else x

    def log_probs(self, target, source=None):
        """Log-probabilities of the token after each target token, over the vocabulary."""
        x = self.stack(target, "decoder", None if source is None else self.stack(source, "encoder"))
        if not self.c.get("adaptive_input"):
            return log_softmax(x @ self.w["decoder.output_projection.weight"].T)
        head = "decoder.adaptive_softmax"
        words, classes = self.w[f"{head}.head.word_proj.weight"], self.w[f"{head}.head.class_proj.weight"]
        first = log_softmax(x @ np.concatenate([words, classes]).T)
        parts = [first[:, : len(words)]]
        for i in range(2):
            table, projection = self.w[f"{head}.tail.{i}.2.weight"], self.w[f"{head}.tail.{i}.0.weight"]
            parts.append(first[:, len(words) + i, None] + log_softmax(x @ projection @ table.T))
        return np.concatenate(parts, 1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
