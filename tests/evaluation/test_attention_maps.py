"""Attention maps: what each layer's attention makes of its own input."""

import jax.numpy as jnp
import numpy as np
import pytest

from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.evaluation.attention_maps import attention_maps
from tests.conftest import error, make_model, micro, micro_mt, random_tokens

TOKENS = random_tokens(1, 12)[0].tolist()


def test_maps_are_the_weights_of_each_layers_input():
    """In a hybrid: layer 0 softmax, layer 1 T2R. The input of layer 1 is computed here by hand."""
    model = swap(make_model(micro(layers=2, adaptive_cutoffs=())), features=4, keep="0")
    maps = attention_maps(model, TOKENS)
    assert maps.shape == (2, model.config.heads, 12, 12) and not np.triu(maps, 1).any()
    np.testing.assert_allclose(maps[0].sum(-1), 1, rtol=1e-5)
    assert maps[1].min() >= 0 and maps[1].sum(-1).max() < 1 + 1e-5
    tokens, first, second = jnp.asarray([TOKENS]), model.blocks[0], model.blocks[1]
    x, _ = first(model.embed(tokens, jnp.arange(12)[None]))
    assert error(maps[1], second.attention.weights(second.attention_norm(x))[0]) < 1e-5


def test_merging_changes_no_map():
    model = swap(make_model(micro(layers=2, adaptive_cutoffs=())), features=4)
    assert error(attention_maps(merge(model), TOKENS), attention_maps(model, TOKENS)) < 1e-5


def test_what_has_no_maps_is_refused():
    with pytest.raises(InputError, match="a translation model"):
        attention_maps(make_model(micro_mt()), TOKENS)
    with pytest.raises(InputError, match="at least one token"):
        attention_maps(make_model(micro()), [])
    with pytest.raises(InputError, match="12 tokens are too many"):
        attention_maps(make_model(micro(positions="learned", max_positions=8)), TOKENS)
