// all_layers.cu, part 3: the two products of each half of a layer, and the residual stream.

// Adds the products of 16 inputs x with a tile of 16 outputs.
void multiply_tile(float (&sums)[GROUPS][2][4], const uint4 (&x)[GROUPS], Fragment fragment) {
  const uint4 weights = weights_of(fragment);
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    multiply_weights(sums[group][0], x[group], weights.x, weights.y);
    multiply_weights(sums[group][1], x[group], weights.z, weights.w);
  }
}

// The same for a chunk of tiles, in several chains of sums that do not wait for each other.
constexpr int CHAINS = GROUPS == 1 ? 2 : 1;
typedef float Sums[CHAINS][GROUPS][2][4];

void multiply_chunk(Sums& sums, const uint4 (*x)[GROUPS], const Chunk& chunk) {
#pragma unroll
  for (int i = 0; i < CHUNK_TILES; i++) multiply_tile(sums[i % CHAINS], x[i], chunk.tiles[i]);
}

float4 four_outputs(const Sums& sums, int group, int half) {  // of the thread's row in this half of a group
  float4 four = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int chain = 0; chain < CHAINS; chain++) {
    const auto& s = sums[chain][group];
    four = add(four, make_float4(s[0][2 * half], s[0][2 * half + 1], s[1][2 * half], s[1][2 * half + 1]));
  }
  return four;
}

// The residual stream in global memory: 16 channels of each row, then the next 16.

int stream_index(int row, int tile, int output) { return (tile * ROWS + row) * 16 + output; }

struct Streams {  // the buffers of a phase
  const float* from;
  float *to, *unused;  // the last is set to zero

  Streams(float* work, int phase)
      : from(buffer(work, phase)), to(buffer(work, phase + 1)), unused(buffer(work, phase + 2)) {}
  static float* buffer(float* work, int phase) { return work + phase % 3 * ROWS * WIDTH; }
};

void zero_share(float* buffer) {  // each block a share of it
  for (u32 i = recomputed(blockIdx.x * THREADS + threadIdx.x); i < ROWS * WIDTH / 4; i += BLOCKS * THREADS) {
    ((float4*)buffer)[i] = make_float4(0, 0, 0, 0);
  }
}

// The first product: x · weightsᵀ for `tiles` of 16 outputs. Each warp multiplies every WARPS-th 16 channels; then the
// sums of all warps are added up. Calls finish(tile, row, first output of four in the tile, the four), with the norm.
//
// Loops are not unrolled where they need not be: what does not fit into the cache of instructions is slow.

struct Moments { float sum[GROUPS][2] = {}, squares[GROUPS][2] = {}; };  // of a thread's channels, by row

// A round of this warp's channels, as operands of tensor cores.
void read_stream(const float* x, int warp, int round, uint4 (&operands)[ROUND_STEPS][GROUPS], Moments& moments) {
  constexpr int AHEAD = ROUND_STEPS * GROUPS < 8 ? ROUND_STEPS : 8 / GROUPS;  // steps that are loaded at once
  const float* own = x + stream_index(lane() / 4, warp, lane() % 4 * 4);
#pragma unroll
  for (int step0 = 0; step0 < ROUND_STEPS; step0 += AHEAD) {
    float4 loaded[AHEAD][GROUPS][2];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD && step0 + ahead < ROUND_STEPS; ahead++)
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; i++) {
        const int number = round * ROUND_STEPS + step0 + ahead, row = lane() / 4 + 8 * i;
        const bool exists = warp + number * WARPS < STEPS && row < BATCH;
        const float* four = own + stream_index(8 * i, number * WARPS, 0);
        loaded[ahead][i / 2][i % 2] = exists ? load_global(four) : make_float4(0, 0, 0, 0);
      }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD && step0 + ahead < ROUND_STEPS; ahead++)
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        uint2 halves[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float4 four = loaded[ahead][group][half];
          moments.sum[group][half] += (four.x + four.y) + (four.z + four.w);
          moments.squares[group][half] += (four.x * four.x + four.y * four.y) + (four.z * four.z + four.w * four.w);
          halves[half] = to_operands(four);
        }
        operands[step0 + ahead][group] = make_uint4(halves[0].x, halves[1].x, halves[0].y, halves[1].y);
      }
  }
}

template <typename Finish>
void stream_product(Shared& shared, Weights& weights, const float* x, int tiles, bool has_norm, const float* sums_of,
                    const float* bias, const float* scale, int number, int point, Finish finish) {
  Fixed& fixed = shared.fixed;
  uint4 operands[ROUND_STEPS][GROUPS];
  Moments moments;
  if (ROUNDS == 1) read_stream(x, weights.warp, 0, operands, moments);
  float4* const partial = fixed.partial[weights.warp] + lane();  // thread (a, b) of 8 × 4 has four outputs of row a
#pragma unroll 1
  for (int first = 0; first < tiles; first += REDUCED) {
    const int count = tiles - first < REDUCED ? tiles - first : REDUCED;
    if (ROUNDS > 1) moments = Moments();
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
      if (ROUNDS > 1) read_stream(x, weights.warp, round, operands, moments);
      if (first == 0 && round == 0) MARK(number, point);
      int left = count * ROUND_CHUNKS;
      Chunk now = weights.read();
#pragma unroll 1
      for (int i = 0; i < count; i++) {
        Sums sums = {};
#pragma unroll
        for (int chunk = 0; chunk < ROUND_CHUNKS; chunk++) {
          Chunk after = now;
          if (--left > 0) after = weights.read();
          multiply_chunk(sums, operands + chunk * CHUNK_TILES, now);
          weights.release();
          now = after;
        }
#pragma unroll
        for (int j = 0; j < 2 * GROUPS; j++) {
          float4& own = partial[(i * ROWS + 8 * j) * 4];
          const float4 four = four_outputs(sums, j / 2, j % 2);
          own = ROUNDS > 1 && round > 0 ? add(own, four) : four;
        }
      }
    }
    MARK(number, point + 1);
    if (first == 0 && has_norm) {
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; i++) {
        const float sum = sum_over_lanes(moments.sum[i / 2][i % 2], 1, 2);
        const float squares = sum_over_lanes(moments.squares[i / 2][i % 2], 1, 2);
        if (lane() % 4 == 0) fixed.moments[weights.warp][lane() / 4 + 8 * i] = make_float2(sum, squares);
      }
    }
    sync();
    for (u32 item = threadIdx.x; item < count * ROWS * 4; item += THREADS) {
      const int tile = first + item / (ROWS * 4), row = item / 4 % ROWS, output = item % 4 * 4;
      if (row >= BATCH) continue;
      float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < WARPS; w++) total = add(total, fixed.partial[w][item]);
      total = unscaled(total, scale + tile * 16 + output);
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

// The second product: of `operand`, for this rank's channels of the stream; each warp has every WARPS-th tile of them,
// OUTPUTS_AT_ONCE together. Adds the result to buffer `to` for the rows that `has` accepts. The first weights are read
// before the operand arrives.

template <typename AnyRole>
struct OperandProduct {
  Weights& weights;
  const AnyRole& role;
  const int chunks;  // of each tile
  int left;          // to read, of all tiles
  Chunk now;

  OperandProduct(Weights& weights, const AnyRole& role, int inputs)
      : weights(weights), role(role), chunks(operand_chunks(inputs)),
        left(role.outputs(weights.warp) * chunks) {
    if (left > 0) {
      now = weights.read();
    } else {
      now = Chunk();  // what may be undefined would take registers throughout the kernel
    }
  }

  template <typename Has>
  void run(Shared& shared, const float* scale, float* to, Has has) {
#pragma unroll 1
    for (int tile = weights.warp; tile < role.stream_tiles(); tile += WARPS * OUTPUTS_AT_ONCE) {
      const uint2* operand = (const uint2*)shared.fixed.operand + lane();  // thread (a, b) has rows a and a + 8
      Sums sums[OUTPUTS_AT_ONCE] = {};
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; chunk++, operand += CHUNK_STEPS * ROWS * 4) {
        uint4 x[CHUNK_STEPS][GROUPS];
#pragma unroll
        for (int i = 0; i < CHUNK_STEPS * GROUPS; i++) {
          const uint2* low = operand + (i / GROUPS * ROWS + i % GROUPS * 16) * 4;
          x[i / GROUPS][i % GROUPS] = make_uint4(low[0].x, low[32].x, low[0].y, low[32].y);
        }
        Chunk after = now;
        if (--left > 0) after = weights.read();
#pragma unroll
        for (int i = 0; i < CHUNK_TILES; i++) {
          const int step = i / OUTPUTS_AT_ONCE;
          multiply_tile(sums[i % OUTPUTS_AT_ONCE][step % CHAINS], x[step], now.tiles[i]);
        }
        weights.release();
        now = after;
      }
      const int output = lane() % 4 * 4;
#pragma unroll
      for (int j = 0; j < 2 * GROUPS * OUTPUTS_AT_ONCE; j++) {
        const int own = tile + j / (2 * GROUPS) * WARPS, half = j % (2 * GROUPS), row = lane() / 4 + 8 * half;
        float4 four = four_outputs(sums[j / (2 * GROUPS)], half / 2, half % 2);
        four = unscaled(four, scale + own * 16 + output);
        if (has(row)) atomic_add(to + stream_index(row, role.rank + own * RANKS, output), four);
      }
    }
  }
};

// Mean and 1 / deviation of each row, for a rank that has no outputs of the first product.
void norm_of_rows(Fixed& fixed, const float* x) {
  for (int row = threadIdx.x / 32; row < BATCH; row += WARPS) {
    float sum = 0, squares = 0;
    for (int channel = threadIdx.x % 32 * 4; channel < WIDTH; channel += 128) {
      const float4 four = load_global(x + stream_index(row, channel / 16, channel % 16));
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
template <typename AnyRole>
void add_residual(Shared& shared, const AnyRole& role, const float* x, float* to, const Residual& residual, bool has_norm,
                  bool norm_is_known) {
  if (NORMS_AFTER && has_norm && !norm_is_known) norm_of_rows(shared.fixed, x);
  for (u32 item = threadIdx.x; item < role.stream_tiles() * ROWS * 4; item += THREADS) {
    const int tile = item / (ROWS * 4), row = item / 4 % ROWS, output = item % 4 * 4, vector = tile * 16 + output;
    if (row >= BATCH) continue;
    const int index = stream_index(row, role.rank + tile * RANKS, output);
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
