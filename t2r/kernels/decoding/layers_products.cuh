// all_layers.cu, part 3: the two products of each half of a layer, and the residual stream.

// Adds the products of 16 inputs x with a tile of 16 outputs.
void multiply_tile(float (&sums)[GROUPS][2][4], const uint4 (&x)[GROUPS], Fragment fragment) {
  const uint4 weights = weights_of(fragment);
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    multiply_add(sums[group][0], x[group], weights.x, weights.y);
    multiply_add(sums[group][1], x[group], weights.z, weights.w);
  }
}

// The residual stream in global memory: 16 channels of each row, then the next 16.

int stream_index(int row, int channel) { return (channel / 16 * ROWS + row) * 16 + channel % 16; }
float* stream_buffer(float* work, int phase) { return work + phase % 3 * ROWS * WIDTH; }

void zero_share(float* buffer) {  // each block a share of it
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < ROWS * WIDTH / 4; i += BLOCKS * THREADS) {
    ((float4*)buffer)[i] = make_float4(0, 0, 0, 0);
  }
}

// The first product: x · weightsᵀ for `tiles` of 16 outputs. Each warp multiplies every WARPS-th 16 channels; then the
// sums of all warps are added up. Calls finish(tile, row, first output of four in the tile, the four), with the norm.
// PASS is the number of tiles for which a thread has registers; if there are more, x is read again.
//
// Loops are not unrolled where they need not be: what does not fit into the cache of instructions is slow.

constexpr int pass_size(int most_tiles) {
  return most_tiles * GROUPS < TILES_OF_REGISTERS ? most_tiles : TILES_OF_REGISTERS / GROUPS;
}

template <int PASS, typename Finish>
void stream_product(Shared& shared, Weights& weights, const float* x, int tiles, bool has_norm, const float* sums_of,
                    const float* bias, const float* scale, int number, int point, Finish finish) {
  constexpr int WARP_STEPS = (STEPS + WARPS - 1) / WARPS, ROUNDS = (WARP_STEPS * GROUPS + 7) / 8;
  constexpr int AHEAD = (WARP_STEPS + ROUNDS - 1) / ROUNDS;  // steps whose x is loaded at once
  constexpr int AT_ONCE = PASS < 4 ? PASS : 4;               // tiles that are read before the first is multiplied
  Fixed& fixed = shared.fixed;
  // Each thread reads what it has written itself.
  uint4(*operands)[GROUPS][32] = (uint4(*)[GROUPS][32])fixed.partial[weights.warp];
  static_assert(AHEAD * GROUPS * 32 <= REDUCED * ROWS * 4, "operands need more space");
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
    load(weights.warp);
#pragma unroll 1
    for (int step0 = weights.warp; step0 < STEPS; step0 += AHEAD * WARPS) {
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
          operands[ahead][group][lane()] = make_uint4(halves[0].x, halves[1].x, halves[0].y, halves[1].y);
        }
      if (first == 0 && step0 == weights.warp) MARK(number, point);
      if (ROUNDS > 1 && step0 + AHEAD * WARPS < STEPS) load(step0 + AHEAD * WARPS);
      const int steps = share(STEPS - step0, 0, WARPS) < AHEAD ? share(STEPS - step0, 0, WARPS) : AHEAD;
#pragma unroll 1
      for (int step = 0; step < steps; step++) {
        uint4 own[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; group++) own[group] = operands[step][group][lane()];
        weights.wait_for(count);
#pragma unroll
        for (int i0 = 0; i0 < PASS; i0 += AT_ONCE) {
          if (i0 >= count) break;
          Fragment fragments[AT_ONCE];
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) fragments[i] = weights.at(i0 + i);  // beyond `count`: others, in vain
#pragma unroll
          for (int i = 0; i < AT_ONCE && i0 + i < PASS; i++) {
            if (i0 + i < count) multiply_tile(sums[i0 + i], own, fragments[i]);
          }
        }
        weights.move_on(count);
      }
    }
    MARK(number, point + 1);
    if (first == 0 && has_norm) {
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; i++) {
        const float total = sum_over_lanes(sum[i / 2][i % 2], 1, 2);
        const float total_squares = sum_over_lanes(squares[i / 2][i % 2], 1, 2);
        if (lane() % 4 == 0) fixed.moments[weights.warp][lane() / 4 + 8 * i] = make_float2(total, total_squares);
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
          fixed.partial[weights.warp][((i - round) * ROWS + row) * 4 + lane() % 4] =
              make_float4(s[0][half], s[0][half + 1], s[1][half], s[1][half + 1]);
        }
      }
      sync();
      const int items = (count - round < REDUCED ? count - round : REDUCED) * ROWS * 4;
      for (int item = threadIdx.x; item < items; item += THREADS) {
        const int tile = first + round + item / (ROWS * 4), row = item / 4 % ROWS, output = item % 4 * 4;
        if (row >= BATCH) continue;
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) total = add(total, fixed.partial[w][item]);
        if (INT8) total = multiplied(total, four_at(scale + tile * 16 + output));
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
}

// The second product: of `operand`, for this rank's channels of the stream; each warp has every WARPS-th tile of them.
// Adds the result to buffer `to` for the rows that `has` accepts.

template <typename Has>
void operand_product(Shared& shared, Weights& weights, const Role& role, int inputs, const float* scale, float* to,
                     Has has) {
  constexpr int MOST_OWN = share(MOST_STREAM_TILES, 0, WARPS), PASS = MOST_OWN * GROUPS < 4 ? MOST_OWN : 4 / GROUPS;
  constexpr int AT_ONCE = PASS < 4 ? 4 : 2;  // steps
  const int own_tiles = share(role.stream_tiles(), weights.warp, WARPS), steps = inputs / 16;
  const uint2* operand = (const uint2*)shared.fixed.operand + lane();
  for (int first = 0; first < own_tiles; first += PASS) {
    const int count = own_tiles - first < PASS ? own_tiles - first : PASS;
    float sums[PASS][GROUPS][2][4] = {};
#pragma unroll 1
    for (int step0 = 0; step0 < steps; step0 += AT_ONCE) {
      const int now = steps - step0 < AT_ONCE ? steps - step0 : AT_ONCE;
      Fragment fragments[AT_ONCE][PASS];
      uint4 x[AT_ONCE][GROUPS];
      weights.wait_for(now * count);
#pragma unroll
      for (int step = 0; step < AT_ONCE; step++) {  // beyond `now`: others, in vain
#pragma unroll
        for (int i = 0; i < PASS; i++) fragments[step][i] = weights.at(step * count + i);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
          const uint2* low = operand + ((step < now ? step0 + step : 0) * ROWS + group * 16) * 4;
          x[step][group] = make_uint4(low[0].x, low[32].x, low[0].y, low[32].y);
        }
      }
#pragma unroll
      for (int step = 0; step < AT_ONCE; step++)
#pragma unroll
        for (int i = 0; i < PASS; i++) {
          if (step < now && i < count) multiply_tile(sums[i], x[step], fragments[step][i]);
        }
      weights.move_on(now * count);
    }
#pragma unroll
    for (int i = 0; i < PASS; i++) {
      if (i >= count) break;
      const int tile = weights.warp + (first + i) * WARPS, output = lane() % 4 * 4;
      const int channel = (role.rank + tile * RANKS) * 16 + output;
#pragma unroll
      for (int j = 0; j < 2 * GROUPS; j++) {
        const auto& s = sums[i][j / 2];
        const int half = j % 2 * 2, row = lane() / 4 + 8 * j;
        float4 four = make_float4(s[0][half], s[0][half + 1], s[1][half], s[1][half + 1]);
        if (INT8) four = multiplied(four, four_at(scale + tile * 16 + output));
        if (has(row)) atomic_add(to + stream_index(row, channel), four);
      }
    }
  }
}

// Mean and 1 / deviation of each row, for a rank that has no outputs of the first product.
void norm_of_rows(Fixed& fixed, const float* x) {
  for (int row = threadIdx.x / 32; row < BATCH; row += WARPS) {
    float sum = 0, squares = 0;
    for (int channel = threadIdx.x % 32 * 4; channel < WIDTH; channel += 128) {
      const float4 four = load_global(x + stream_index(row, channel));
      sum += (four.x + four.y) + (four.z + four.w);
      squares += (four.x * four.x + four.y * four.y) + (four.z * four.z + four.w * four.w);
    }
    sum = sum_over_lanes(sum, 1, 16), squares = sum_over_lanes(squares, 1, 16);
    const float mean = RMS_NORM ? 0 : sum / WIDTH;
    if (threadIdx.x % 32 == 0) {
      fixed.norm[row] = make_float2(mean, rsqrtf(fmaxf(squares / WIDTH - mean * mean, 0.f) + NORM_EPS));
    }
  }
  sync();
}

// Adds x, with norms after its norm, and the branch's bias: what the sum over all clusters has once.
template <typename Has>
void add_residual(Shared& shared, const Role& role, const float* x, float* to, const Residual& residual, bool has_norm,
                  Has has) {
  for (int item = threadIdx.x; item < role.stream_tiles() * ROWS * 4; item += THREADS) {
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
