"""Layouts of weights and activations for small matrix products on a GPU: operands are stored in the order of reading.

Tensor cores multiply 16 × 16 by 16 × 8 values at once. Each of a warp's 32 threads holds some values of both operands
and of the result. In these layouts a thread's values are 16 consecutive bytes, followed by those of the next thread,
then of the next warp. So nothing is shuffled between loading and multiplying. Warps divide the inputs, over which a
product is a sum, and add up their results at the end.

A matrix is (outputs, inputs). Its outputs are cut into tiles, one for each program, and its inputs into parts of
`support.INPUTS_PER_PART`, which a program multiplies one after the other. A batch is cut into groups of
`support.SEQUENCES_PER_GROUP` sequences. "Packed" means in these layouts.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from t2r.kernels.decoding import support
from t2r.kernels.decoding.matrices import Matrix
from t2r.kernels.decoding.warps import add_product_by_warps

# Tensor cores compute 8 outputs at once; with more than 32, a program runs out of registers.
LEAST_OUTPUTS_PER_TILE, MOST_OUTPUTS_PER_TILE = 8, 32


class PackedMatrix(NamedTuple):
    """A matrix in tiles, with vectors in float32; or, in a kernel, references to these arrays.

    The scale and bias of the norm before the product are folded into weights and bias. With them, the product with the
    normed x is (weights · x − mean · weight_sums) / deviation + bias.
    """

    tiles: Float[Array, "tiles parts size"]
    weight_sums: Float[Array, "outputs"]  # over inputs
    bias: Float[Array, "outputs"]

    @property
    def tile_count(self) -> int:
        return self.tiles.shape[0]

    @property
    def part_count(self) -> int:
        return self.tiles.shape[1]

    @property
    def outputs_per_tile(self) -> int:
        return self.bias.shape[0] // self.tile_count

    @property
    def inputs_per_part(self) -> int:
        return self.tiles.shape[2] // self.outputs_per_tile


class Tile(NamedTuple):
    """A tile of a matrix that a program has loaded."""

    parts: list[Float[Array, "size"]]
    weight_sums: Float[Array, "outputs"]
    bias: Float[Array, "outputs"]
    first: Array  # number of its first output

    @property
    def outputs(self) -> Int[Array, "outputs"]:
        """Numbers of its outputs within the matrix."""
        return self.first + jnp.arange(len(self.bias))


def rearrange(x: Array, sizes: dict[str, int], order: str) -> Array:
    """Splits x into axes of these names and sizes, and transposes them into this order."""
    names = list(sizes)
    return x.reshape(*sizes.values()).transpose(*(names.index(name) for name in order.split()))


# Axes of the layouts below. Sequences, outputs and inputs are counted by several axes, from coarse to fine:
#   output   = tile, output_octet (of 8), output (8)
#   sequence = group (of 16), sequence_half (2), sequence (8)
#   input    = part, warp, input_block (of 32; of activations, 16), input_octet (of 8), pair (4), element (2)
# A thread is (output, pair) or (sequence, pair) of its warp. Its 8 values are the axes after these.
WEIGHT_LAYOUT = "output_octet input_block warp output pair input_octet element"
ACTIVATION_LAYOUT = "input_block warp sequence pair input_octet sequence_half element"


def pack(matrix: Matrix, dtype) -> PackedMatrix:
    """Packs a matrix: (tile, part, WEIGHT_LAYOUT)."""
    weights = matrix.weights.astype(dtype)
    outputs, inputs = weights.shape
    needed = -(-outputs // support.LEAST_PROGRAMS)  # outputs in a tile if there are LEAST_PROGRAMS tiles
    outputs_per_tile = min(MOST_OUTPUTS_PER_TILE, max(LEAST_OUTPUTS_PER_TILE, 1 << (needed - 1).bit_length()))
    inputs_per_part = min(inputs, support.INPUTS_PER_PART)
    tiles = rearrange(
        weights,
        dict(
            tile=-1,
            output_octet=outputs_per_tile // 8,
            output=8,
            part=inputs // inputs_per_part,
            warp=support.WARPS,
            input_block=inputs_per_part // support.WARPS // 32,
            input_octet=4,
            pair=4,
            element=2,
        ),
        f"tile part {WEIGHT_LAYOUT}",
    ).reshape(outputs // outputs_per_tile, -1, outputs_per_tile * inputs_per_part)
    return PackedMatrix(tiles, weights.sum(1, dtype=jnp.float32), matrix.bias)


def load_tile(matrix: PackedMatrix, number: Array) -> Tile:
    """In a program: loads tile `number`."""
    count = matrix.outputs_per_tile
    first = number * count
    parts = [matrix.tiles[number, part] for part in range(matrix.part_count)]
    return Tile(parts, *(vector[pl.ds(first, count)] for vector in (matrix.weight_sums, matrix.bias)), first)


def unpack_weights(part: Float[Array, "size"], outputs: int) -> Float[Array, "warps outputs inputs_per_warp"]:
    """One part of a tile, with each warp's inputs."""
    sizes = dict(
        output_octet=outputs // 8, input_block=-1, warp=support.WARPS, output=8, pair=4, input_octet=4, element=2
    )
    order = "warp output_octet output input_block input_octet pair element"
    return rearrange(part, sizes, order).reshape(support.WARPS, outputs, -1)


def pack_activations(x: Float[Array, "b n"]) -> Float[Array, "groups size"]:
    """Packs activations: (group, part, ACTIVATION_LAYOUT); zeros fill the last group. See also `packed_index`."""
    batch, channels = x.shape
    part = min(channels, support.INPUTS_PER_PART)
    padded = jnp.pad(x, [(0, -batch % support.SEQUENCES_PER_GROUP), (0, 0)])
    return rearrange(
        padded,
        dict(
            group=-1,
            sequence_half=2,
            sequence=8,
            part=channels // part,
            warp=support.WARPS,
            input_block=part // support.WARPS // 16,
            input_octet=2,
            pair=4,
            element=2,
        ),
        f"group part {ACTIVATION_LAYOUT}",
    ).reshape(-1, support.SEQUENCES_PER_GROUP * channels)


def unpack_activations(packed: Float[Array, "groups size"]) -> Float[Array, "b n"]:
    """The inverse of `pack_activations`, with the padding."""
    channels = packed.shape[1] // support.SEQUENCES_PER_GROUP
    part = min(channels, support.INPUTS_PER_PART)
    return rearrange(
        packed,
        dict(
            group=-1,
            part=channels // part,
            input_block=part // support.WARPS // 16,
            warp=support.WARPS,
            sequence=8,
            pair=4,
            input_octet=2,
            sequence_half=2,
            element=2,
        ),
        "group sequence_half sequence part warp input_block input_octet pair element",
    ).reshape(-1, channels)


def packed_index(sequence: Array, channel: Array, channels: int) -> Array:
    """Index of an activation within its packed group; `sequence` counts within the group.

    A thread's 8 values are channels 2t, 2t + 1, 2t + 8 and 2t + 9 of a block of 16, of sequences s and s + 8.
    """
    part = min(channels, support.INPUTS_PER_PART)
    per_warp = part // support.WARPS
    warp, block, within_block = channel % part // per_warp, channel % per_warp // 16, channel % 16
    thread = (block * support.WARPS + warp) * 32 + sequence % 8 * 4 + within_block % 8 // 2
    start = channel // part * (support.SEQUENCES_PER_GROUP * part)
    return start + thread * 8 + within_block // 8 * 4 + sequence // 8 * 2 + channel % 2


def packed_indices(channels: Int[Array, "n"], total: int) -> Int[Array, "sequences n"]:
    """Indices of these channels, out of `total`, of all sequences of a packed group."""
    return packed_index(jnp.arange(support.SEQUENCES_PER_GROUP)[:, None], channels[None, :], total)


def load_activations(x, group: Array, matrix: PackedMatrix) -> list[Float[Array, "size"]]:
    """In a program: loads the packed activations of a group, in the parts that this matrix multiplies."""
    size = support.SEQUENCES_PER_GROUP * matrix.inputs_per_part
    return [x[group, pl.ds(part * size, size)] for part in range(matrix.part_count)]


def product(activations: list[Array], tile: Tile) -> Float[Array, "sequences outputs"]:
    """x · weightsᵀ, from the parts of packed activations and of a tile."""
    outputs = len(tile.bias)
    total = jnp.full((support.WARPS, support.SEQUENCES_PER_GROUP, outputs), _zero_after_loads(), jnp.float32)
    sizes = dict(input_block=-1, warp=support.WARPS, sequence=8, pair=4, input_octet=2, sequence_half=2, element=2)
    order = "warp sequence_half sequence input_block input_octet pair element"
    for packed, weights in zip(activations, tile.parts):
        x = rearrange(packed, sizes, order).reshape(support.WARPS, support.SEQUENCES_PER_GROUP, -1)
        total = add_product_by_warps(total, x, unpack_weights(weights, outputs))
    return total.sum(0)


def _zero_after_loads() -> Array:
    """Zero, computed so that products which start from it are not scheduled before the loads.

    The compiler cannot see that it is zero, and warps compute it from each other's values, so all of them have issued
    their loads before any has it. Otherwise the compiler would save registers by keeping few loads in flight.
    """
    return jnp.minimum(jnp.arange(32 * support.WARPS), 0).max(0).astype(jnp.float32)
