"""A language or translation model whose attention is a recurrence, in plain torch, for `transformers`.

"Finetuning Pretrained Transformers into RNNs" (Kasai et al., 2021) replaces the similarity exp(q·k/√d) of softmax
attention by φ(q)·φ(k), where φ is a feature map. Attention is then an RNN with a state (S, z) of one size:

    S_i = S_{i−1} + φ(k_i) ⊗ v_i        z_i = z_{i−1} + φ(k_i)        out_i = φ(q_i)·S_i / φ(q_i)·z_i

A prompt is read in chunks: all pairs of query and key within a chunk, the state between chunks. Each generated token is
one step of the recurrence. Layers may also have softmax attention, or attention that is exact for a window of the last
tokens. Axes of arrays, in all of this file:

    b batch, n queries, m keys, g key/value heads, r query heads per key/value head, d head size, k features
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from .configuration_t2r import T2RConfig

CHUNK = 64  # tokens of a prompt that are read at once
LOWEST = -1e30  # the logarithm of nothing; finite, because −∞ − (−∞) is not a number
LARGEST = 30.0  # of the logarithm of the weight of distant keys above the largest exact score

# What callers may ask for and would miss: it is refused, not ignored.
UNSUPPORTED = ("inputs_embeds", "output_hidden_states", "output_attentions")
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_exact": F.gelu,
    "swish": F.silu,
}


# The state


class LinearState(NamedTuple):
    """What linear attention remembers: the true S and z are S · exp(log_scale) and z · exp(log_scale)."""

    S: torch.Tensor  # (b, g, k, d)
    z: torch.Tensor  # (b, g, k)
    log_scale: torch.Tensor  # (b, g): the running maximum of the keys' own


class WindowedState(NamedTuple):
    """The state of the distant keys, and the exact keys and values, in slots that are used in turn."""

    distant: LinearState
    k: torch.Tensor  # (b, g, slots, d)
    v: torch.Tensor  # (b, g, slots, d)
    count: torch.Tensor  # (b,): tokens of each sequence so far


class SoftmaxState(NamedTuple):
    """The keys and values of all tokens so far: it grows."""

    k: torch.Tensor  # (b, g, m, d)
    v: torch.Tensor  # (b, g, m, d)
    valid: torch.Tensor  # (b, m): False for padding


def leaves(state):
    """All tensors of a state."""
    return [state] if isinstance(state, torch.Tensor) else [leaf for part in state for leaf in leaves(part)]


def mapped(function, state):
    """The state with a function of each of its tensors."""
    if isinstance(state, torch.Tensor):
        return function(state)
    return type(state)(*(mapped(function, part) for part in state))


class T2RCache:
    """The `past_key_values` of this model: a state for each layer, of one size at any length but for softmax layers."""

    is_compileable = False

    def __init__(self, layers, position, source=None):
        self.layers = layers  # a state for each layer
        self.position = position  # (b,): tokens of each sequence so far, without padding
        self.source = source  # translation: each layer's state over the source, which never changes
        self.seen = 0  # tokens so far, with padding

    def get_seq_length(self, layer_idx=0):
        return self.seen

    def reorder_cache(self, beam_idx):
        """Beam search: sequence i continues from sequence beam_idx[i], which has the same source."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats):
        self._map(lambda x: x.repeat_interleave(repeats, 0))
        if self.source is not None:
            self.source = [mapped(lambda x: x.repeat_interleave(repeats, 0), state) for state in self.source]

    def _map(self, function):
        self.layers = [mapped(function, state) for state in self.layers]
        self.position = function(self.position)

    def state_bytes(self):
        """Bytes of all layers' states."""
        return sum(x.numel() * x.element_size() for state in self.layers for x in leaves(state))


# Feature maps: each returns φ(x) / exp(log_scale) and log_scale, which is 0 unless φ exponentiates. That of a query
# cancels in the normalised output of linear attention; beside exact attention it does not.


class FeatureMap(nn.Module):
    """φ(q) of queries (b, n, g, r, d) and φ(k) of keys (b, m, g, d); log_scale is (b, n, g, r) and (b, m, g)."""

    def queries(self, q):
        features = self.features(q * self.query_scale, is_query=True)
        return features, features.new_zeros(features.shape[:-1])

    def keys(self, k):
        features = self.features(k, is_query=False)
        return features, features.new_zeros(features.shape[:-1])

    query_scale = 1.0


class T2RFeatures(FeatureMap):
    """The paper's: φ(x) = relu(W x + b), one single-layer MLP for each head; queries are scaled by d^-½ first."""

    def __init__(self, heads, head_dim, features):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(heads, features, head_dim) * head_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads, features))
        self.query_scale = head_dim**-0.5

    def features(self, x, is_query):
        bias = self.bias[:, None] if is_query else self.bias
        return self.activation(torch.einsum("bng...d,gkd->bng...k", x, self.weight) + bias).float()

    def activation(self, hidden):
        return F.relu(hidden)

    def normalise(self, denominator):
        return denominator.clamp(min=1e-2)


class T2REluFeatures(T2RFeatures):
    """T2R with ELU's activation: φ(x) = elu(W x + b) + 1."""

    def activation(self, hidden):
        return F.elu(hidden) + 1


class HedgehogFeatures(FeatureMap):
    """Zhang et al. (2024): φ(x) = softmax([W x, −W x]) over the features, with x scaled by d^-¼."""

    def __init__(self, heads, head_dim, features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, features // 2, head_dim) * head_dim**-0.5)

    def features(self, x, is_query):
        exponents = torch.einsum("bng...d,gkd->bng...k", x.float(), self.weight.float()) * x.shape[-1] ** -0.25
        return torch.cat([exponents, -exponents], -1).softmax(-1)

    def normalise(self, denominator):
        return denominator.clamp(min=1e-6)


class MergedFeatures(FeatureMap):
    """T2R's φ where W and b are merged into the projections, which then give W x + b."""

    def features(self, x, is_query):
        return F.relu(x).float()

    normalise = T2RFeatures.normalise


class EluFeatures(FeatureMap):
    """Katharopoulos et al. (2020): φ(x) = elu(x) + 1."""

    def features(self, x, is_query):
        return (F.elu(x) + 1).float()

    def normalise(self, denominator):
        return denominator + 1e-6


class RfaFeatures(FeatureMap):
    """Peng et al. (2021): random Fourier features, φ(x) = 0.8 / √D · [sin W x̂, cos W x̂] with x̂ = x / (‖x‖ + 10^-3)."""

    def __init__(self, heads, head_dim, features):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(heads, features // 2, head_dim), requires_grad=False)

    def features(self, x, is_query):
        x = x.float()
        unit = x / (x.norm(dim=-1, keepdim=True) + 1e-3)
        angles = torch.einsum("bng...d,gkd->bng...k", unit, self.directions.float())
        return 0.8 * self.directions.shape[1] ** -0.5 * torch.cat([angles.sin(), angles.cos()], -1)

    def normalise(self, denominator):
        return denominator.clamp(min=1.0)


class PerformerFeatures(FeatureMap):
    """Choromanski et al. (2021): φ(x) = k^-½ · exp(W x − ‖x‖²/2) x scaled by d^-¼; log_scale: largest exponent."""

    def __init__(self, heads, head_dim, features):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(heads, features, head_dim), requires_grad=False)

    def queries(self, x):
        x = x.float() * x.shape[-1] ** -0.25
        exponents = torch.einsum("bng...d,gkd->bng...k", x, self.directions.float())
        exponents = exponents - 0.5 * (x * x).sum(-1, keepdim=True) - 0.5 * math.log(exponents.shape[-1])
        largest = exponents.amax(-1)
        return (exponents - largest[..., None]).exp(), largest

    keys = queries

    def normalise(self, denominator):
        return denominator.clamp(min=1e-15)


def make_feature_map(shape, spec):
    if spec.kind == "merged":
        return MergedFeatures()
    if spec.feature_map == "elu":
        return EluFeatures()
    # RFA with fixed draws differs in training only.
    kinds = {"t2r": T2RFeatures, "rfa": RfaFeatures, "rfa_fixed": RfaFeatures, "performer": PerformerFeatures}
    kinds |= {"hedgehog": HedgehogFeatures, "t2r_elu": T2REluFeatures}
    return kinds[spec.feature_map](shape.kv_heads, shape.head_dim, spec.features)


# Linear attention


def empty_linear_state(batch, heads, features, head_dim, device):
    """The state before the first token; in float32, whatever the type of the weights."""
    zeros = lambda *sizes: torch.zeros(batch, heads, *sizes, device=device)  # noqa: E731
    return LinearState(zeros(features, head_dim), zeros(features), zeros() + LOWEST)


def update(state, k, log_scale, v):
    """The recurrence, for one or more keys and values: S + Σ φ(k) ⊗ v and z + Σ φ(k).

    Both are kept relative to the largest log_scale so far.
    """
    largest = torch.maximum(state.log_scale, log_scale.amax(1))
    k = k * (log_scale - largest[:, None]).exp()[..., None]
    shrink = (state.log_scale - largest).exp()[..., None]
    S = state.S * shrink[..., None] + torch.einsum("bmgk,bmgd->bgkd", k, v.float())
    return LinearState(S, state.z * shrink + k.sum(1), largest)


def read(state, q, normalise):
    """out = φ(q)·S / φ(q)·z."""
    numerator = torch.einsum("bngrk,bgkd->bngrd", q, state.S)
    denominator = torch.einsum("bngrk,bgk->bngr", q, state.z)
    return numerator / normalise(denominator)[..., None]


def read_chunk(state, q, k, log_scale, v, normalise):
    """The outputs of a chunk of tokens: all pairs of query and key within it, and the state before it."""
    largest = torch.maximum(state.log_scale[:, None], log_scale.cummax(1).values)  # (b, n, g): as the RNN would have it
    similarity = torch.einsum("bngrk,bmgk->bgnrm", q, k)
    # Positive only for later keys, which are masked; the clamp prevents an overflow there.
    factor = (log_scale.mT[:, :, None, :] - largest.mT[..., None]).clamp(max=0).exp()
    length = q.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    similarity = similarity * torch.where(causal, factor, 0)[:, :, :, None]
    q = q * (state.log_scale[:, None] - largest).exp()[..., None, None]
    denominator = similarity.sum(-1) + torch.einsum("bngrk,bgk->bgnr", q, state.z)
    numerator = torch.einsum("bgnrm,bmgd->bgnrd", similarity, v.float()) + torch.einsum("bngrk,bgkd->bgnrd", q, state.S)
    return (numerator / normalise(denominator)[..., None]).transpose(1, 2)


# Attention modules: `forward` is causal; `build_state` and `read_state` are bidirectional and cross attention.


class Norm(nn.Module):
    """A layer norm or an RMS norm over the last axis, computed in float32."""

    def __init__(self, size, eps, rms):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = None if rms else nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        if self.bias is not None:
            return F.layer_norm(y, y.shape[-1:], self.weight.float(), self.bias.float(), self.eps).to(x.dtype)
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (y * self.weight.float()).to(x.dtype)


class Rotary:
    """Rotary positions: pairs of dimensions of queries and keys rotate by position · frequency."""

    def __init__(self, config, theta=None):
        size = config.rope_size or config.head_dim
        frequencies = [(theta or config.rope_theta) ** (-i / (size // 2)) for i in range(size // 2)]
        # A layer with its own theta has no scaling.
        self.frequencies = frequencies if theta else self.scaled(frequencies, config)
        self.gain = 1.0 if theta else config.rope_gain

    @staticmethod
    def scaled(frequencies, config):
        """The frequencies as adapted to longer sequences than those of the pretraining."""
        if config.rope_scaling == "linear":
            return [f / config.rope_factor for f in frequencies]
        if config.rope_scaling == "factors":
            return [f / factor for f, factor in zip(frequencies, config.rope_factors)]
        if config.rope_scaling == "llama3":
            rotations = [config.rope_original * f / (2 * math.pi) for f in frequencies]
            shares = [(r - config.rope_low) / (config.rope_high - config.rope_low) for r in rotations]
            shares = [min(max(share, 0.0), 1.0) for share in shares]
            return [share * f + (1 - share) * f / config.rope_factor for share, f in zip(shares, frequencies)]
        return frequencies

    def __call__(self, x, positions):
        """x (b, n, heads, d), rotated at positions (b, n)."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=x.device)
        angle = (positions[..., None].float() * frequencies)[:, :, None]
        sin, cos, half = angle.sin() * self.gain, angle.cos() * self.gain, len(self.frequencies)
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
        return torch.cat([rotated, x[..., 2 * half :]], -1)


class Attention(nn.Module):
    """The projections that all kinds of attention have."""

    def __init__(self, config, spec, positions):
        super().__init__()
        self.spec, self.heads, self.kv_heads, self.head_dim = spec, config.heads, config.kv_heads, config.head_dim
        merged = spec.kind == "merged"
        size = spec.features if merged else self.head_dim
        bias = config.bias if config.projection_bias is None else config.projection_bias
        out_bias = config.bias if config.out_bias is None else config.out_bias
        self.query = nn.Linear(config.width, self.heads * size, bias=bias or merged)
        self.key = nn.Linear(config.width, self.kv_heads * size, bias=bias or merged)
        self.value = nn.Linear(config.width, self.kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.width, bias=out_bias)
        self.rotary = Rotary(config, spec.rope_theta) if positions and spec.rotary else None
        self.query_norm = self.key_norm = None
        self.norm_all_heads = config.query_norm_heads
        if config.query_norm and not merged:
            self.query_norm, self.key_norm = (
                Norm(heads * self.head_dim if self.norm_all_heads else self.head_dim, config.norm_eps, rms=True)
                for heads in (self.heads, self.kv_heads)
            )

    def queries(self, x, positions):
        """(b, n, g, r, d)."""
        q = self._prepared(self.query(x), self.heads, self.query_norm, positions)
        return q.unflatten(2, (self.kv_heads, -1))

    def keys(self, x, positions):
        """(b, m, g, d)."""
        return self._prepared(self.key(x), self.kv_heads, self.key_norm, positions)

    def values(self, x):
        """(b, m, g, d)."""
        return self.value(x).unflatten(-1, (self.kv_heads, -1))

    def _prepared(self, x, heads, norm, positions):
        """Projections by head; normalised and rotated if the model does that."""
        if norm is not None and self.norm_all_heads:
            x = norm(x)
        x = x.unflatten(-1, (heads, -1))
        if norm is not None and not self.norm_all_heads:
            x = norm(x)
        return x if self.rotary is None else self.rotary(x, positions)

    def finish(self, out):
        """The output projection of all heads, (b, n, g, r, d) → (b, n, width)."""
        return self.out(out.flatten(2).to(self.out.weight.dtype))


class SoftmaxAttention(Attention):
    """The transformer's attention: out_i = Σ_j softmax_j(q_i·k_j/√d) v_j."""

    def empty_state(self, batch, device, dtype):
        cache = torch.zeros(batch, self.kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        return SoftmaxState(cache, cache, torch.zeros(batch, 0, dtype=torch.bool, device=device))

    def forward(self, x, positions, mask, state):
        new = self.build_state(x, mask, positions)
        state = SoftmaxState(*(torch.cat([old, added], dim) for old, added, dim in zip(state, new, (2, 2, 1))))
        length, total = x.shape[1], state.valid.shape[1]
        own = torch.arange(total - length, total, device=x.device)[:, None]  # the slot of each query's own key
        slots = torch.arange(total, device=x.device)
        allowed = state.valid[:, None] & (slots <= own)
        if self.spec.window:  # only the last tokens; padding has no position
            position = state.valid.cumsum(1)
            allowed &= position[:, total - length :, None] - position[:, None] < self.spec.window
        # Padding sees itself, so that it does not become NaN.
        return self.attend(self.queries(x, positions), state, allowed | (slots == own)), state

    def attend(self, q, state, allowed):
        q = q.flatten(2, 3).transpose(1, 2)  # (b, heads, n, d)
        per_group = self.heads // self.kv_heads
        k, v = (x.repeat_interleave(per_group, 1) for x in (state.k, state.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])
        return self.finish(out.transpose(1, 2))

    def build_state(self, source, mask, positions=None):
        k, v = self.keys(source, positions), self.values(source)
        return SoftmaxState(k.transpose(1, 2), v.transpose(1, 2), mask)

    def read_state(self, x, state, positions=None):
        return self.attend(self.queries(x, positions), state, state.valid[:, None])


class LinearAttention(Attention):
    """Attention as an RNN: see the top of this file."""

    def __init__(self, config, spec, positions):
        super().__init__(config, spec, positions)
        self.feature_map = make_feature_map(config, spec)

    def empty_state(self, batch, device, dtype):
        return empty_linear_state(batch, self.kv_heads, self.spec.features, self.head_dim, device)

    def key_features(self, x, mask, positions):
        """φ(k) with its log_scale; padding is zero, so that it adds nothing to the state."""
        k, log_scale = self.feature_map.keys(self.keys(x, positions))
        return torch.where(mask[..., None, None], k, 0), torch.where(mask[..., None], log_scale, LOWEST)

    def forward(self, x, positions, mask, state):
        (q, _), v = self.feature_map.queries(self.queries(x, positions)), self.values(x)
        (k, log_scale), normalise = self.key_features(x, mask, positions), self.feature_map.normalise
        if x.shape[1] == 1:  # the RNN
            state = update(state, k, log_scale, v)
            return self.finish(read(state, q, normalise)), state
        outs = []
        for chunk in zip(*(tensor.split(CHUNK, 1) for tensor in (q, k, log_scale, v))):
            outs.append(read_chunk(state, *chunk, normalise))
            state = update(state, *chunk[1:])
        return self.finish(torch.cat(outs, 1)), state

    def build_state(self, source, mask, positions=None):
        empty = self.empty_state(len(source), source.device, source.dtype)
        return update(empty, *self.key_features(source, mask, positions), self.values(source))

    def read_state(self, x, state, positions=None):
        q, _ = self.feature_map.queries(self.queries(x, positions))
        return self.finish(read(state, q, self.feature_map.normalise))


class Mixture(nn.Module):
    """The logarithm of the weight that a query gives to distant keys: u·q + b for each query head."""

    def __init__(self, heads, per_group, head_dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, per_group, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, per_group))

    def forward(self, q):
        return torch.einsum("bngrd,grd->bngr", q.float(), self.weight.float()) + self.bias.float()


class WindowedAttention(Attention):
    """Exact attention to the last `window` tokens and the first `sinks`, linear attention to all others.

        weight_ij = exp(q_i·k_j/√d)                for exact keys
                  = exp(mix_i) · φ(q_i)·φ(k_j)     for distant keys
        out_i = Σ_j weight_ij v_j / Σ_j weight_ij

    A key enters S and z when it leaves the window. The exact keys lie in slots: sinks have their own, later keys take
    turns in the others.
    """

    def __init__(self, config, spec, positions):
        super().__init__(config, spec, positions)
        self.feature_map = make_feature_map(config, spec)
        self.mixture = Mixture(self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        self.size, self.sinks, self.slots = spec.window, spec.sinks, spec.window + spec.sinks

    def empty_state(self, batch, device, dtype):
        distant = empty_linear_state(batch, self.kv_heads, self.spec.features, self.head_dim, device)
        slots = torch.zeros(batch, self.kv_heads, self.slots, self.head_dim, device=device, dtype=dtype)
        return WindowedState(distant, slots, slots, torch.zeros(batch, dtype=torch.long, device=device))

    def forward(self, x, positions, mask, state):
        q, k, v = self.queries(x, positions), self.keys(x, positions), self.values(x)
        features, log_scale = self.feature_map.queries(q)
        arrays = (q * self.head_dim**-0.5, features, self.mixture(q) + log_scale, k, v, mask)
        step, outs = self.step if x.shape[1] == 1 else self.chunk, []
        for chunk in zip(*(array.split(CHUNK, 1) for array in arrays)):
            out, state = step(*chunk, state)
            outs.append(out)
        return self.finish(torch.cat(outs, 1)), state

    def step(self, q, features, mix, k, v, mask, state):
        """The RNN: the key that leaves the window enters S and z, the new one takes its slot, the query reads all."""
        count, is_real = state.count, mask[:, 0]
        slot = torch.where(count < self.sinks, count, self.sinks + (count - self.sinks) % self.size)
        index = slot[:, None, None, None].expand(-1, self.kv_heads, 1, self.head_dim)
        old_k, old_v = state.k.gather(2, index), state.v.gather(2, index)
        leaves_window = (is_real & (count >= self.slots))[:, None]
        distant = self.add_distant(state.distant, old_k.transpose(1, 2), old_v.transpose(1, 2), leaves_window)
        real = is_real[:, None, None, None]
        k, v = torch.where(real, k.transpose(1, 2), old_k), torch.where(real, v.transpose(1, 2), old_v)
        state = WindowedState(distant, state.k.scatter(2, index, k), state.v.scatter(2, index, v), count + is_real)
        filled = torch.arange(self.slots, device=k.device) < state.count[:, None]
        keys, values = state.k.transpose(1, 2), state.v.transpose(1, 2)
        return self.attend(
            q, features, mix, keys, values, filled[:, None], torch.zeros_like(filled)[:, None], distant
        ), state

    def chunk(self, q, features, mix, k, v, mask, state):
        """Several tokens at once: all pairs with the keys in the slots and those of the chunk."""
        in_slots = self.positions_in_slots(state.count)
        own = state.count[:, None] + mask.cumsum(1) - 1
        k, v = (torch.cat([old.transpose(1, 2), new], 1) for old, new in ((state.k, k), (state.v, v)))
        position = torch.cat([in_slots, own], 1)
        valid = torch.cat([in_slots < state.count[:, None], mask], 1)
        distance = own[:, :, None] - position[:, None]
        seen = valid[:, None] & (distance >= 0)
        near = (distance < self.size) | (position < self.sinks)[:, None]
        out = self.attend(q, features, mix, k, v, seen & near, seen & ~near, state.distant)

        count = state.count + mask.sum(1)
        left = valid & (position >= self.sinks) & (position < (count - self.size)[:, None])
        distant = self.add_distant(state.distant, k, v, left)
        # Each slot keeps its key, or takes the new one that has its position: the nth that is not padding.
        wanted, order = self.positions_in_slots(count), (~mask).to(torch.int8).argsort(dim=1, stable=True)
        nth = wanted - state.count[:, None]
        new_index = self.slots + order.gather(1, nth.clamp(0, mask.shape[1] - 1))
        takes_new = (nth >= 0) & (wanted < count[:, None])
        source = torch.where(takes_new, new_index, torch.arange(self.slots, device=k.device))
        source = source[:, None, :, None].expand(-1, self.kv_heads, -1, self.head_dim)
        k, v = (x.transpose(1, 2).gather(2, source) for x in (k, v))
        return out, WindowedState(distant, k, v, count)

    def positions_in_slots(self, count):
        """The position of the key in each slot after `count` tokens; count or more in slots not yet written."""
        slot, latest = torch.arange(self.slots, device=count.device), count[:, None] - 1
        in_turn = latest - (latest - slot) % self.size
        return torch.where((slot < self.sinks) | (slot > latest), slot, in_turn)

    def add_distant(self, distant, k, v, which):
        features, log_scale = self.feature_map.keys(k)
        features = torch.where(which[..., None, None], features, 0)
        return update(distant, features, torch.where(which[..., None], log_scale, LOWEST), v)

    def attend(self, q, features, mix, k, v, exact, distant, past):
        """The equation of this class, for given sets of keys (b, n, m); `past` has further distant keys."""
        scores = torch.einsum("bngrd,bmgd->bgnrm", q.float(), k.float())
        exact, distant = exact[:, None, :, None], distant[:, None, :, None]
        largest = torch.where(exact, scores, LOWEST).amax(-1)
        weights = torch.where(exact, (scores - largest[..., None]).exp(), 0)
        near = weights.sum(-1)

        key_features, log_scale = self.feature_map.keys(k)
        log_scale = log_scale.mT[:, :, None, None]  # (b, g, 1, 1, m)
        scale = torch.where(distant, log_scale, LOWEST).amax(-1)
        scale = torch.maximum(scale, past.log_scale[:, :, None, None])  # (b, g, n, 1)
        mix = (mix.transpose(1, 2) + scale - largest).clamp(max=LARGEST).exp()
        similarity = torch.einsum("bngrk,bmgk->bgnrm", features, key_features)
        similarity = similarity * (log_scale - scale[..., None]).clamp(max=0).exp()
        similarity = torch.where(distant, similarity, 0)
        weights = weights + mix[..., None] * similarity
        features = features.transpose(1, 2) * (past.log_scale[:, :, None, None] - scale).exp()[..., None]
        far = similarity.sum(-1) + torch.einsum("bgnrk,bgk->bgnr", features, past.z)
        out = torch.einsum("bgnrm,bmgd->bgnrd", weights, v.float())
        out = out + mix[..., None] * torch.einsum("bgnrk,bgkd->bgnrd", features, past.S)
        total = near + mix * far.clamp(min=0)  # random features may be negative
        total = torch.where(total > 0, total, 1)  # padding may see no key
        return (out / total[..., None]).transpose(1, 2)


ATTENTION = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "merged": LinearAttention,
    "windowed": WindowedAttention,
}


def make_attention(config, spec, *, cross=False):
    """The attention that a spec describes. Cross attention has no rotary positions."""
    return ATTENTION[spec.kind](config, spec, config.positions == "rotary" and not cross)


# The transformer


class FeedForward(nn.Module):
    """down(activation(up(x))), or if gated down(activation(gate(x)) · up(x))."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, config.feedforward, bias=config.bias)
        self.gate = nn.Linear(config.width, config.feedforward, bias=config.bias) if config.gated else None
        self.down = nn.Linear(config.feedforward, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x):
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A layer: attention, cross attention in a decoder over a source, feed-forward; each is a residual branch."""

    def __init__(self, config, spec, cross=None):
        super().__init__()
        norm = lambda: Norm(config.width, config.norm_eps, config.norm == "rms")  # noqa: E731
        self.attention_norm, self.attention = norm(), make_attention(config, spec)
        if cross is not None:
            self.cross_norm, self.cross = norm(), make_attention(config, cross, cross=True)
        self.feedforward_norm, self.feedforward = norm(), FeedForward(config)
        if config.norm_placement == "both":
            self.attention_out_norm, self.feedforward_out_norm = norm(), norm()
        self.placement, self.parallel = config.norm_placement, config.parallel

    def forward(self, x, positions, mask, state=None, source=None):
        """The output and the state after these tokens; without a state, attention is bidirectional."""

        def attention(x):
            nonlocal state
            if state is None:
                return self.attention.read_state(x, self.attention.build_state(x, mask, positions), positions)
            out, state = self.attention(x, positions, mask, state)
            return out

        layer_input = x
        x = self.add_branch(x, x, "attention", attention)
        if source is not None:
            x = self.add_branch(x, x, "cross", lambda x: self.cross.read_state(x, source))
        x = self.add_branch(x, layer_input if self.parallel else x, "feedforward", self.feedforward)
        return x, state

    def add_branch(self, x, branch_input, name, branch):
        """x + branch(branch_input), normalised before, after, at both ends of the branch, or at its output."""
        norm = getattr(self, f"{name}_norm")
        out = branch(norm(branch_input) if self.placement in ("before", "both") else branch_input)
        if self.placement == "output":
            out = norm(out)
        if self.placement == "both":
            out = getattr(self, f"{name}_out_norm")(out)
        return norm(x + out) if self.placement == "after" else x + out


class Embedding(nn.Embedding):
    """An embedding table; logits are its product with a hidden vector, or that of another table."""

    def __init__(self, config, size, has_output=True):
        super().__init__(size, config.width)
        self.output = nn.Parameter(torch.zeros(size, config.width)) if has_output and not config.tied_output else None
        self.bias = nn.Parameter(torch.zeros(size)) if has_output and config.output_bias else None

    def logits(self, x):
        table = self.weight if self.output is None else self.output
        logits = (x @ table.T).float()
        return logits if self.bias is None else logits + self.bias.float()


class AdaptiveEmbedding(nn.Module):
    """Adaptive embeddings and softmax (Baevski & Auli, 2019): bands of rarer tokens have narrower embeddings.

    The first softmax is over the tokens of the first band and a class for each further one:
    p(token) = p(class of its band) · p(token | band).
    """

    def __init__(self, config):
        super().__init__()
        self.bounds = (0, *config.adaptive_cutoffs, config.vocab_size)
        bands = range(len(self.bounds) - 1)
        sizes = [config.width // config.adaptive_factor**band for band in bands]
        tables = [torch.zeros(self.bounds[band + 1] - self.bounds[band], sizes[band]) for band in bands]
        self.tables = nn.ParameterList(tables)
        self.projections = nn.ParameterList([torch.zeros(size, config.width) for size in sizes])
        self.classes = nn.Parameter(torch.zeros(config.width, len(sizes) - 1))

    def forward(self, tokens):
        x = 0
        for low, table, projection in zip(self.bounds, self.tables, self.projections):
            in_band = (tokens >= low) & (tokens < low + len(table))
            embedded = table[torch.where(in_band, tokens - low, 0)] @ projection
            x = x + torch.where(in_band[..., None], embedded, 0)
        return x

    def logits(self, x):
        """Log-probabilities: scores of different bands are not comparable before they are normalised."""
        head = (x @ torch.cat([self.tables[0], self.classes.T]).T).float().log_softmax(-1)
        first = self.bounds[1]
        bands = [head[..., :first]]
        for band in range(1, len(self.tables)):
            within = (x @ self.projections[band].T @ self.tables[band].T).float().log_softmax(-1)
            bands.append(head[..., first + band - 1, None] + within)
        return torch.cat(bands, -1)


def sinusoids(positions, width, is_open):
    """[sin(position · f_i), cos(position · f_i)] at frequencies from 1 to 1/10,000, or almost to it if open."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions.device) / (half if is_open else max(half - 1, 1))
    angle = positions[..., None].float() * (-math.log(10_000.0) * steps).exp()
    return torch.cat([angle.sin(), angle.cos()], -1)


class Stack(nn.Module):
    """Positions, layers and norms, of an encoder or of a decoder."""

    def __init__(self, config, blocks):
        super().__init__()
        norm = lambda: Norm(config.width, config.norm_eps, config.norm == "rms")  # noqa: E731
        self.positions = nn.Embedding(config.max_positions, config.width) if config.positions == "learned" else None
        self.embedding_norm = norm() if config.embedding_norm else None
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = norm() if config.final_norm else None
        self.shape = config

    def embed(self, embedding, tokens, positions):
        """The first layer's input: token embeddings plus positions."""
        shape, x = self.shape, embedding(tokens)
        scale = shape.embedding_multiplier * (shape.width**0.5 if shape.scale_embedding else 1.0)
        x = x if scale == 1 else x * scale
        if shape.positions.startswith("sinusoidal"):
            is_open = shape.positions == "sinusoidal_open"
            x = x + sinusoids(positions + shape.position_offset, shape.width, is_open).to(x.dtype)
        elif self.positions is not None:
            x = x + self.positions(positions)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def finish(self, x):
        return x if self.final_norm is None else self.final_norm(x)


class Encoder(Stack):
    """A bidirectional encoder with softmax attention."""

    main_input_name = "input_ids"

    def __init__(self, config, shared):
        softmax = SimpleNamespace(kind="softmax", window=0, rope_theta=None, rotary=True)
        super().__init__(config, [Block(config, softmax) for _ in range(config.encoder_layers)])
        self.embedding = None
        if not config.shared_embedding:
            self.embedding = Embedding(config, config.source_vocab_size, has_output=False)
        object.__setattr__(self, "shared", shared)  # the decoder's, which is not stored a second time

    def forward(self, input_ids, attention_mask=None, **kwargs):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask.bool()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        x = self.embed(self.shared if self.embedding is None else self.embedding, input_ids, positions)
        for block in self.blocks:
            x, _ = block(x, positions, mask)
        return BaseModelOutput(last_hidden_state=self.finish(x))


class T2RPreTrainedModel(PreTrainedModel):
    config_class = T2RConfig
    main_input_name = "input_ids"
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # the model makes its own cache

    def __init__(self, config):
        super().__init__(config)
        shape = SimpleNamespace(**config.architecture)
        specs = [SimpleNamespace(**spec) for spec in shape.attention]
        crosses = [SimpleNamespace(**spec) for spec in shape.cross_attention] or [None] * shape.layers
        adaptive = bool(shape.adaptive_cutoffs)
        self.embedding = AdaptiveEmbedding(shape) if adaptive else Embedding(shape, shape.vocab_size)
        self.decoder = Stack(shape, [Block(shape, spec, cross) for spec, cross in zip(specs, crosses)])
        self.encoder = Encoder(shape, self.embedding) if shape.encoder_layers else None
        self.post_init()

    def _init_weights(self, module):
        """Modules draw their own initial weights."""

    def get_input_embeddings(self):
        return self.embedding

    def new_cache(self, batch, source=None):
        """The state before the first token of each sequence."""
        states = []
        for block in self.decoder.blocks:  # which may be on different devices
            weight = block.attention.value.weight
            states.append(block.attention.empty_state(batch, weight.device, weight.dtype))
        device = next(self.embedding.parameters()).device
        return T2RCache(states, torch.zeros(batch, dtype=torch.long, device=device), source)

    def decode(self, tokens, attention_mask, cache, position_ids=None, **others):
        """The last hidden layer of each token; the cache is then after these tokens."""
        for name in UNSUPPORTED:
            if others.get(name) is not None and others[name] is not False:
                raise ValueError(f"{name} is not supported by this model: leave it out")
        if not isinstance(cache, T2RCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}: this model needs its own T2RCache, or None")
        length = tokens.shape[1]
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.ndim} dimensions: this model needs 2, batch and tokens"
            )
        if attention_mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        else:
            mask = attention_mask[:, -length:].to(tokens.device).bool()
        positions = (cache.position[:, None] + mask.cumsum(1) - 1).clamp(min=0)
        if position_ids is not None and bool(((positions != position_ids.to(positions.device)) & mask).any()):
            raise ValueError("position_ids are not those of attention_mask, which this model uses: leave them out")
        most = self.decoder.shape.max_positions
        if most and cache.seen + length > most and int(positions.max()) >= most:
            raise ValueError(f"{int(positions.max()) + 1} tokens are too many: this model has {most} positions")
        x = self.decoder.embed(self.embedding, tokens, positions)
        for layer, block in enumerate(self.decoder.blocks):
            source = None if cache.source is None else cache.source[layer]
            x, cache.layers[layer] = block(x, positions, mask, cache.layers[layer], source)
        cache.position, cache.seen = cache.position + mask.sum(1), cache.seen + length
        return self.decoder.finish(x)


class T2RForCausalLM(T2RPreTrainedModel, GenerationMixin):
    """A language model."""

    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """`attention_mask` is 0 at padding, which may be anywhere in a sequence and never enters the state."""
        cache = self.new_cache(len(input_ids)) if past_key_values is None else past_key_values
        hidden = self.decode(input_ids, attention_mask, cache, **kwargs)
        logits = self.embedding.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        keeps = self.config.use_cache if use_cache is None else use_cache
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if keeps else None)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, use_cache=True, **kwargs
    ):
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        inputs = {"input_ids": input_ids[:, seen:], "attention_mask": attention_mask, "logits_to_keep": 1}
        return inputs | {"past_key_values": past_key_values, "use_cache": use_cache}


class T2RForSeq2SeqLM(T2RPreTrainedModel, GenerationMixin):
    """A translation model: an encoder of the source, and a language model of the target that attends to it."""

    def get_encoder(self, *args, **kwargs):
        return self.encoder

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        **kwargs,
    ):
        """The masks are 0 at padding. Without `decoder_input_ids`, these are the `labels` after the start token."""
        if decoder_input_ids is None and labels is not None:
            start = labels.new_full((len(labels), 1), self.config.decoder_start_token_id)
            decoder_input_ids = torch.cat([start, labels[:, :-1].clamp(min=0)], 1)
        cache = past_key_values
        if cache is None:
            if encoder_outputs is None:
                encoder_outputs = self.encoder(input_ids, attention_mask)
            hidden = encoder_outputs[0]
            mask = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask
            source = [block.cross.build_state(hidden, mask.bool()) for block in self.decoder.blocks]
            cache = self.new_cache(len(decoder_input_ids), source)
        logits = self.embedding.logits(self.decode(decoder_input_ids, decoder_attention_mask, cache, **kwargs))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        keeps = self.config.use_cache if use_cache is None else use_cache
        output = Seq2SeqLMOutput(loss=loss, logits=logits, past_key_values=cache if keeps else None)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def prepare_inputs_for_generation(
        self,
        decoder_input_ids,
        past_key_values=None,
        attention_mask=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        use_cache=True,
        **kwargs,
    ):
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        return {
            "decoder_input_ids": decoder_input_ids[:, seen:],
            "attention_mask": attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            "encoder_outputs": encoder_outputs,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
        }
