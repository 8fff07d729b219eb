// all_layers.cu, part 2: the two products of each half of a layer, the weights that they read, and the residual stream.

// Weights. A warp waits for a chunk before it reads it, and releases it when it will read no more of it.

struct Weights {
  Shared& shared;
  int first = 0, released = 0, ready = 0;  // numbers of chunks: the layer's first; those below are released, loaded
  int position = 0;                        // the product's first tile, in the layer

  // Before reading tiles from `from` to `to`; none before `from` will be read any more.
  void need(int from, int to) {
    const int from_chunk = first + from / CHUNK_TILES, to_chunk = first + to / CHUNK_TILES;
    release_before(from_chunk);
    while (ready <= to_chunk) wait_for_next();
  }

  void release_before(int chunk) {
    while (released < chunk) {
      if (ready == released) wait_for_next();
      __syncwarp();
      if (lane() == 0) arrive(&shared.empty[released % SLOTS]);
      released++;
    }
  }

  void wait_for_next() {
    wait_for_loads(&shared.full[ready % SLOTS], ready / SLOTS % 2);
    ready++;
  }

  uint4 tile(int number) const {
    return shared.ring[(first + number / CHUNK_TILES) % SLOTS][number % CHUNK_TILES * 32 + lane()];
  }

  // After a product, by all warps: also one that has read none of its tiles releases them.
  void next_product(int tiles) {
    position += tiles;
    release_before(first + position / CHUNK_TILES);
  }

  void next_layer(const Role& role) {
    first += (role.tiles() + CHUNK_TILES - 1) / CHUNK_TILES;
    position = 0;
    release_before(first);
  }
};

void load_weights(Shared& shared) {  // one thread: all chunks of all layers
  int number = 0;
  u32 seen = 0;
  for (int layer = 0; layer < LAYERS; layer++) {
    const Layer& own = shared.fixed.layers[layer];
    const int chunks = (Role(own.kind).tiles() + CHUNK_TILES - 1) / CHUNK_TILES;
    const int stride = own.kind == MERGED ? MERGED_CHUNKS : own.kind == SOFTMAX ? SOFTMAX_CHUNKS : LINEAR_CHUNKS;
    const uint4* from = own.weights + (u64)blockIdx.x * stride * CHUNK;
    for (int chunk = 0; chunk < chunks; chunk++, number++) {
      const int slot = number % SLOTS;
      if (number >= SLOTS) {
        const u32 parity = (number / SLOTS - 1) % 2;
        while (PACED && !has_ended(&shared.empty[slot], parity)) {
          seen = wait_for_change(&shared.fixed.streams_read, seen);
        }
        wait_for_sends(&shared.empty[slot], parity);
      }
      expect_bytes(&shared.full[slot], sizeof(shared.ring[0]));
      load_async(shared.ring[slot], from + chunk * CHUNK, sizeof(shared.ring[0]), &shared.full[slot]);
    }
  }
}

// The residual stream in global memory: 16 channels of each row, then the next 16.

int stream_index(int row, int channel) { return (channel / 16 * ROWS + row) * 16 + channel % 16; }
float* stream_buffer(float* work, int phase) { return work + phase % 3 * ROWS * WIDTH; }

void zero_share(float* buffer) {  // each block a share of it
  for (int i = blockIdx.x * COMPUTING + threadIdx.x; i < ROWS * WIDTH / 4; i += BLOCKS * COMPUTING) {
    ((float4*)buffer)[i] = make_float4(0, 0, 0, 0);
  }
}

// The first product: x · weightsᵀ for `tiles` of 16 outputs. Each warp multiplies every WARPS-th 16 channels; then the
// sums of all warps are added up. Calls finish(tile, row, first output of four in the tile, the four), with the norm.
// PASS is the number of tiles for which a thread has registers; if there are more, x is read again.

constexpr int pass_size(int most_tiles) { return most_tiles * GROUPS < 12 ? most_tiles : 12 / GROUPS; }

template <int PASS, typename Finish>
void stream_product(Shared& shared, Weights& weights, const float* x, int tiles, bool has_norm, const float* sums_of,
                    const float* bias, Finish finish) {
  constexpr int WARP_STEPS = (STEPS + WARPS - 1) / WARPS;
  constexpr int AHEAD = ((WARP_STEPS < 6 ? WARP_STEPS : 4) + GROUPS - 1) / GROUPS;  // steps whose x is loaded at once
  Fixed& fixed = shared.fixed;
  for (int first = 0; first < tiles; first += PASS) {
    const int count = tiles - first < PASS ? tiles - first : PASS;
    float sums[PASS][GROUPS][2][4] = {}, sum[GROUPS][2] = {}, squares[GROUPS][2] = {};
    float4 loaded[AHEAD][GROUPS][2];
    const auto load = [&](int step0) {
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ahead++)
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; i++) {
          const int step = step0 + ahead * WARPS, row = lane() / 4 + 8 * i;
          const float* four = x + stream_index(row, step * 16 + lane() % 4 * 4);
          loaded[ahead][i / 2][i % 2] = step < STEPS && row < BATCH ? load_global(four) : make_float4(0, 0, 0, 0);
        }
    };
    load(warp());
    for (int step0 = warp(); step0 < STEPS; step0 += AHEAD * WARPS) {
      uint4 operands[AHEAD][GROUPS];
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ahead++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
          uint2 halves[2];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float4 four = loaded[ahead][group][half];
            sum[group][half] += (four.x + four.y) + (four.z + four.w);
            squares[group][half] += (four.x * four.x + four.y * four.y) + (four.z * four.z + four.w * four.w);
            halves[half] = to_bfloats(four);
          }
          operands[ahead][group] = make_uint4(halves[0].x, halves[1].x, halves[0].y, halves[1].y);
        }
      if (step0 + AHEAD * WARPS < STEPS) load(step0 + AHEAD * WARPS);
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ahead++) {
        const int step = step0 + ahead * WARPS, tile = weights.position + first * STEPS + step * count;
        if (step >= STEPS) break;
        weights.need(tile, tile + count - 1);
#pragma unroll
        for (int i = 0; i < PASS; i++) {
          if (i < count) {
            const uint4 fragment = weights.tile(tile + i);
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
              multiply_add(sums[i][group][0], operands[ahead][group], fragment.x, fragment.y);
              multiply_add(sums[i][group][1], operands[ahead][group], fragment.z, fragment.w);
            }
          }
        }
      }
    }
    if (first == 0 && has_norm) {
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; i++) {
        const float total = sum_over_lanes(sum[i / 2][i % 2], 1, 2);
        const float total_squares = sum_over_lanes(squares[i / 2][i % 2], 1, 2);
        if (lane() % 4 == 0) fixed.moments[warp()][lane() / 4 + 8 * i] = make_float2(total, total_squares);
      }
    }
#pragma unroll
    for (int round = 0; round < PASS; round += REDUCED) {
      if (round >= count) break;
#pragma unroll
      for (int i = round; i < round + REDUCED && i < PASS; i++) {
#pragma unroll
        for (int j = 0; j < 2 * GROUPS; j++) {
          const auto& s = sums[i][j / 2];
          const int half = j % 2 * 2, row = lane() / 4 + 8 * j;
          fixed.partial[warp()][((i - round) * ROWS + row) * 4 + lane() % 4] =
              make_float4(s[0][half], s[0][half + 1], s[1][half], s[1][half + 1]);
        }
      }
      sync();
      if (PACED && first == 0 && round == 0 && threadIdx.x == 0) change(&fixed.streams_read);
      const int items = (count - round < REDUCED ? count - round : REDUCED) * ROWS * 4;
      for (int item = threadIdx.x; item < items; item += COMPUTING) {
        const int tile = first + round + item / (ROWS * 4), row = item / 4 % ROWS, output = item % 4 * 4;
        if (row >= BATCH) continue;
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) total = add(total, fixed.partial[w][item]);
        float2 norm = make_float2(0, 1);
        if (has_norm) {
          float x_sum = 0, x_squares = 0;
#pragma unroll
          for (int w = 0; w < WARPS; w++) x_sum += fixed.moments[w][row].x, x_squares += fixed.moments[w][row].y;
          const float mean = RMS_NORM ? 0 : x_sum / WIDTH;
          // Rounding may make the variance of nearly equal numbers negative.
          norm = make_float2(mean, rsqrtf(fmaxf(x_squares / WIDTH - mean * mean, 0.f) + NORM_EPS));
        }
        if (tile == 0 && output == 0) fixed.norm[row] = norm;
        const float4 centred = RMS_NORM ? total : add(total, -norm.x, four_at(sums_of + tile * 16 + output));
        finish(tile, row, output, add(four_at(bias + tile * 16 + output), norm.y, centred));
      }
      sync();
    }
  }
  weights.next_product(tiles * STEPS);
}

// The second product: of `operand`, for this rank's channels of the stream; each warp has every WARPS-th tile of them.
// Adds the result to buffer `to` for the rows that `has` accepts.

template <typename Has>
void operand_product(Shared& shared, Weights& weights, const Role& role, int inputs, float* to, Has has) {
  constexpr int AT_ONCE = 4;  // steps
  const int steps = inputs / 16, tiles = role.stream_tiles();
  const uint2* own = (const uint2*)shared.fixed.operand + lane();
  for (int first = 0; first < tiles; first += WARPS) {
    const int count = tiles - first < WARPS ? tiles - first : WARPS;
    if (warp() >= count) break;
    const int tile0 = weights.position + first * steps + warp();
    float sums[GROUPS][2][4] = {};
    for (int step0 = 0; step0 < steps; step0 += AT_ONCE) {
      const int last = steps - step0 < AT_ONCE ? steps - 1 : step0 + AT_ONCE - 1;
      weights.need(tile0 + step0 * count, tile0 + last * count);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int step = step0 + i;
        if (step < steps) {
          const uint4 fragment = weights.tile(tile0 + step * count);
#pragma unroll
          for (int group = 0; group < GROUPS; group++) {
            const uint2 low = own[(step * ROWS + group * 16) * 4], high = own[(step * ROWS + group * 16 + 8) * 4];
            const uint4 x = make_uint4(low.x, high.x, low.y, high.y);
            multiply_add(sums[group][0], x, fragment.x, fragment.y);
            multiply_add(sums[group][1], x, fragment.z, fragment.w);
          }
        }
      }
    }
    const int channel = (role.rank + (first + warp()) * RANKS) * 16 + lane() % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; i++) {
      const auto& s = sums[i / 2];
      const int half = i % 2 * 2, row = lane() / 4 + 8 * i;
      const float4 four = make_float4(s[0][half], s[0][half + 1], s[1][half], s[1][half + 1]);
      if (has(row)) atomic_add(to + stream_index(row, channel), four);
    }
  }
  weights.next_product(tiles * steps);
}

// Adds x, with norms after its norm, and the branch's bias: what the sum over all clusters has once.
template <typename Has>
void add_residual(Shared& shared, const Role& role, const float* x, float* to, const Residual& residual, bool has_norm,
                  Has has) {
  for (int item = threadIdx.x; item < role.stream_tiles() * ROWS * 4; item += COMPUTING) {
    const int tile = item / (ROWS * 4), row = item / 4 % ROWS, output = item % 4 * 4, vector = tile * 16 + output;
    if (!has(row)) continue;
    const int index = stream_index(row, (role.rank + tile * RANKS) * 16 + output);
    float4 four = load_global(x + index);
    if (NORMS_AFTER && has_norm) {
      const float2 norm = shared.fixed.norm[row];
      const float4 scale = four_at(residual.norm_scale + vector), bias = four_at(residual.norm_bias + vector);
      four = make_float4((four.x - norm.x) * norm.y * scale.x + bias.x, (four.y - norm.x) * norm.y * scale.y + bias.y,
                         (four.z - norm.x) * norm.y * scale.z + bias.z, (four.w - norm.x) * norm.y * scale.w + bias.w);
    }
    atomic_add(to + index, add(four, four_at(residual.bias + vector)));
  }
}

// Exchange: sends 8 values (16 bytes) of a row to the operands of a rank of the cluster.
void send_piece(Shared& shared, int row, int channel, uint4 eight, int rank, const u64* barrier) {
  send(shared.fixed.operand + (channel / 16 * ROWS + row) * 2 + channel % 16 / 8, rank, eight, barrier);
}
