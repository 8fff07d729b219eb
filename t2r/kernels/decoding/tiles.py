"""Factors of small products, kept as a GPU's threads multiply them: nothing moves between reading and multiplying.

Tensor cores multiply 16 × 16 by 16 × 8 numbers at once. Each of a warp's 32 threads gives some of both, and gets some
of the result. Here it finds its own by reading 16 bytes, one thread after the other, one warp after the other. Warps
divide the columns, over which products are sums, and add them up at the end.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from t2r.kernels.decoding import support
from t2r.kernels.decoding.warps import add_product_by_warps


class Matrix(NamedTuple):
    """An output in each row, and what is added to it."""

    rows: Float[Array, "n k"]
    bias: Float[Array, "n"]


class PackedMatrix(NamedTuple):
    """A matrix with an output in each row, in tiles for one program each, and what belongs to its rows, in float32.

    The scale and bias of a norm before it are part of it: of the product with a normed x they leave
    (x · rowᵀ − mean · Σ row) / deviation + bias. The same for references to these arrays.
    """

    tiles: Float[Array, "tiles parts size"]
    sums: Float[Array, "n"]
    bias: Float[Array, "n"]

    @property
    def per_tile(self) -> int:
        return self.bias.shape[0] // self.count

    @property
    def count(self) -> int:
        """Of tiles."""
        return self.tiles.shape[0]

    @property
    def columns(self) -> int:
        """Of one part."""
        return self.tiles.shape[2] // self.per_tile


class Tile(NamedTuple):
    """What a program has read of a matrix."""

    numbers: list[Float[Array, "size"]]  # of each part
    sums: Float[Array, "rows"]
    bias: Float[Array, "rows"]
    first: Array  # of its rows

    @property
    def rows(self) -> Int[Array, "rows"]:
        return self.first + jnp.arange(len(self.bias))


def pack(matrix: Matrix, dtype) -> PackedMatrix:
    """A matrix as programs read it: of a row columns 2t and 2t + 1, the same 8 columns further, 16, and 24."""
    rows = matrix.rows.astype(dtype)
    count = min(32, max(8, 1 << (-(-len(rows) // support.PROGRAMS) - 1).bit_length()))
    columns = min(rows.shape[1], support.COLUMNS)
    apart = rows.reshape(
        -1, count // 8, 8, rows.shape[1] // columns, support.WARPS, columns // support.WARPS // 32, 4, 4, 2
    )
    #       tile, 8 rows, row, part, warp, 32 columns, 8 columns, pair, column → tile, part, then as they are read
    tiles = apart.transpose(0, 3, 1, 5, 4, 2, 7, 6, 8).reshape(len(rows) // count, -1, count * columns)
    return PackedMatrix(tiles, rows.sum(1, dtype=jnp.float32), matrix.bias)


def read_tile(rows: PackedMatrix, number: Array) -> Tile:
    """Asks for a tile, in a program."""
    first, count = number * rows.per_tile, rows.per_tile
    numbers = [rows.tiles[number, part] for part in range(rows.tiles.shape[1])]
    return Tile(numbers, *(array[pl.ds(first, count)] for array in (rows.sums, rows.bias)), first)


def of_rows(numbers: Float[Array, "size"], count: int) -> Float[Array, "warps rows columns/warps"]:
    """A part of a tile, with each warp's columns."""
    apart = numbers.reshape(count // 8, -1, support.WARPS, 8, 4, 4, 2)
    return apart.transpose(2, 0, 3, 1, 5, 4, 6).reshape(support.WARPS, count, -1)


def factors(x: Float[Array, "b n"]) -> Float[Array, "groups n"]:
    """Texts' numbers, in the order of `index`, filled up to whole groups of `support.TEXTS` texts."""
    texts, columns = x.shape
    part, filled = min(columns, support.COLUMNS), jnp.pad(x, [(0, -texts % support.TEXTS), (0, 0)])
    apart = filled.reshape(-1, 2, 8, columns // part, support.WARPS, part // support.WARPS // 16, 2, 4, 2)
    #       group, 8 texts, text, part, warp, 16 columns, 8 columns, pair, column → as they are read
    return apart.transpose(0, 3, 5, 4, 2, 7, 6, 1, 8).reshape(-1, support.TEXTS * columns)


def texts(factors: Float[Array, "groups n"]) -> Float[Array, "b n"]:
    """And back, a text in each row."""
    columns = factors.shape[1] // support.TEXTS
    part = min(columns, support.COLUMNS)
    apart = factors.reshape(-1, columns // part, part // support.WARPS // 16, support.WARPS, 8, 4, 2, 2, 2)
    return apart.transpose(0, 7, 4, 1, 3, 2, 6, 5, 8).reshape(-1, columns)


def index(text: Array, column: Array, columns: int) -> Array:
    """Where a number stands in its group. A thread reads 8 at once: of the texts g and g + 8 columns 2t and 2t + 1, and
    the same 8 columns further."""
    part, each = min(columns, support.COLUMNS), min(columns, support.COLUMNS) // support.WARPS
    warp, block, within = column % part // each, column % each // 16, column % 16
    thread = (block * support.WARPS + warp) * 32 + text % 8 * 4 + within % 8 // 2
    return column // part * (support.TEXTS * part) + thread * 8 + within // 8 * 4 + text // 8 * 2 + column % 2


def indices(rows: Int[Array, "rows"], columns: int) -> Int[Array, "texts rows"]:
    """Where outputs stand, as factors of the next product."""
    return index(jnp.arange(support.TEXTS)[:, None], rows[None, :], columns)


def read_factors(x, group: Array, rows: PackedMatrix) -> list[Float[Array, "size"]]:
    """Texts' numbers, part by part."""
    size = support.TEXTS * rows.columns
    return [x[group, pl.ds(part * size, size)] for part in range(rows.tiles.shape[1])]


def product(numbers: list[Array], tile: Tile) -> Float[Array, "texts rows"]:
    """x · rowsᵀ."""
    count = len(tile.bias)
    found = jnp.full((support.WARPS, support.TEXTS, count), _zero_after_reading(), jnp.float32)
    for part, rows in zip(numbers, tile.numbers):
        apart = part.reshape(-1, support.WARPS, 8, 4, 2, 2, 2).transpose(1, 5, 2, 0, 4, 3, 6)
        found = add_product_by_warps(found, apart.reshape(support.WARPS, support.TEXTS, -1), of_rows(rows, count))
    return found.sum(0)


def _zero_after_reading() -> Array:
    """Zero, which compilers do not see, and warps have from each other: then all of them have asked for what they are
    to read. Products that start from it start after that; else, to spare registers, little is asked for at a time."""
    return jnp.minimum(jnp.arange(32 * support.WARPS), 0).max(0).astype(jnp.float32)
