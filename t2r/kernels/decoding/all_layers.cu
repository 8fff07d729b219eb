// All layers of a decoding step in one kernel, for transformers of many kinds, by the functions of hopper.cuh.
//
// Thread blocks, one on each multiprocessor, form clusters of RANKS. Both halves of a layer have the same plan:
//
//   1. first product      each rank has some outputs, for all channels of the residual stream x (read from global memory)
//   2. what is local      attention: a rank has some sequences;  feed-forward: the activation
//   3. exchange           each rank sends its part of the result to all ranks of the cluster
//   4. second product     each rank has some channels of the stream, to which all clusters add their results
//   5. barrier of all blocks
//
// In attention a cluster has a key/value head with its query heads (or several, one after the other; or none). In the
// feed-forward it has a share of the units. So blocks of different clusters wait for each other only twice a layer.
//
// Weights do not depend on activations: one warp loads them, in the order in which they will be read, into a ring of
// chunks in shared memory, across products, barriers and layers. The memory is never idle while the ring has space.
//
// The stream has three buffers. Phase p (two for each layer) reads buffer p, adds to p + 1, and sets p + 2 to zero
// (modulo 3). The residual is one more contribution to the sum: the clusters of the first head add x itself.
//
// all_layers.py defines the macros: the sizes in capitals that are not defined here.

enum Kind { MERGED, LINEAR, WINDOWED, SOFTMAX };             // of a layer's attention
enum Activation { RELU, GELU, GELU_EXACT, SWISH };

constexpr int GROUPS = (BATCH + 15) / 16, ROWS = 16 * GROUPS;  // tensor cores multiply 16 sequences (rows) at once
constexpr int WARPS = 8, COMPUTING = 32 * WARPS;               // threads that compute
constexpr int THREADS = COMPUTING + 64;                        // then a warp that loads weights, and one that counts blocks
constexpr int LOADING_WARP = WARPS, COUNTING_WARP = WARPS + 1;
constexpr int BLOCKS = CLUSTERS * RANKS;

// Item `index` of a deal of `total` items to `parts` gets every parts-th: how many that are.
constexpr int share(int total, int index, int parts) { return (total - index + parts - 1) / parts; }

// Tiles of matrices: 16 outputs × 16 inputs, 512 bytes, 16 for each of a warp's threads.
constexpr int STEPS = WIDTH / 16;                                // tiles in a row of a product with the stream
constexpr int STREAM_TILES = WIDTH / 16;                         // of outputs that are channels of the stream
constexpr int UNIT_TILE = GATED ? 8 : 16;                        // feed-forward units of a tile; with gates, two outputs each
constexpr int UNIT_ROWS = FEEDFORWARD / (UNIT_TILE * RANKS);     // tiles for each rank, of all clusters together
constexpr int MOST_UP_TILES = (UNIT_ROWS + CLUSTERS - 1) / CLUSTERS;
constexpr int MOST_STREAM_TILES = share(STREAM_TILES, 0, RANKS);
constexpr int MERGED_QKV = (QUERIES + 1) * FEATURES + HEAD_DIM, PLAIN_QKV = (QUERIES + 2) * HEAD_DIM;
constexpr int MOST_QKV = HAS_PLAIN ? PLAIN_QKV : MERGED_QKV;
constexpr int MOST_QKV_TILES = share(MOST_QKV / 16, 0, RANKS);
constexpr int MOST_HEADS = share(KV_HEADS, 0, CLUSTERS);         // of a cluster
constexpr int ATTENDED = QUERIES * HEAD_DIM;                     // outputs of a head's queries
constexpr int MOST_UNITS = MOST_UP_TILES * RANKS * UNIT_TILE;    // of a cluster
constexpr int OPERAND = ATTENDED > MOST_UNITS ? ATTENDED : MOST_UNITS;

static_assert(WIDTH % 16 == 0 && HEAD_DIM % 16 == 0 && FEATURES % 16 == 0, "unsupported sizes");
static_assert(FEEDFORWARD % (UNIT_TILE * RANKS) == 0 && RANKS * UNIT_TILE % 16 == 0 && RANKS <= 32, "unsupported sizes");
static_assert(!HAS_PLAIN || !HAS_MERGED || MERGED_QKV <= PLAIN_QKV, "unsupported sizes");
static_assert(!NORMS_AFTER || (HAS_MERGED ? MERGED_QKV : PLAIN_QKV) / 16 >= RANKS, "each rank computes the norm");

// Softmax layers read a cache that grows. Where clusters are left over, several REPLICAS have the same head and share
// the sequences; and where ranks are left over, SPLITS of them share a sequence, each with a part of the cache.
constexpr int REPLICAS = KV_HEADS < CLUSTERS ? CLUSTERS / KV_HEADS : 1;
constexpr int REPLICA_ROWS = share(BATCH, 0, REPLICAS);
constexpr int SPLITS = HAS_SOFTMAX && RANKS > REPLICA_ROWS ? RANKS / REPLICA_ROWS : 1;
constexpr int RANK_ROWS = share(BATCH, 0, RANKS);                // sequences of a rank, at most

// What a block computes in a layer.
struct Role {
  int cluster = blockIdx.x / RANKS, rank = blockIdx.x % RANKS;
  int head = cluster, heads = share(KV_HEADS, cluster, CLUSTERS);  // the first, and how many
  int replica = 0, replicas = 1, splits = 1;
  int qkv;                                                         // outputs of a head's projections

  Role(int kind) : qkv(HAS_MERGED && kind == MERGED ? MERGED_QKV : PLAIN_QKV) {
    if (!HAS_SOFTMAX || kind != SOFTMAX) return;
    if (REPLICAS > 1) {
      head = cluster % KV_HEADS, heads = cluster < KV_HEADS * REPLICAS;
      replica = cluster / KV_HEADS, replicas = REPLICAS;
    }
    splits = SPLITS;
  }

  int qkv_tiles() const { return share(qkv / 16, rank, RANKS); }
  int up_tiles() const { return UNIT_ROWS / CLUSTERS + (cluster >= CLUSTERS - UNIT_ROWS % CLUSTERS); }
  int stream_tiles() const { return share(STREAM_TILES, rank, RANKS); }
  int units() const { return up_tiles() * RANKS * UNIT_TILE; }
  int tiles() const {  // of the whole layer
    return heads * (qkv_tiles() * STEPS + stream_tiles() * (ATTENDED / 16)) + up_tiles() * STEPS +
           stream_tiles() * (units() / 16);
  }

  // The sequences of this cluster: row n · replicas + replica is its nth. The first of the `splits` ranks that have it
  // is its owner.
  bool has(int row) const { return row < BATCH && row % replicas == replica; }
  int rows() const { return heads ? share(BATCH, replica, replicas) : 0; }
  int rank_of(int n, int split) const { return (n * splits + split) % RANKS; }
  int place_of(int n) const { return n * splits / RANKS; }  // among the sequences of its rank
  // This rank's sequence at a place: its row, or BATCH or more if there is none.
  int nth(int place) const { return (place * RANKS + rank) / splits; }
  int row(int place) const { return nth(place) < rows() ? nth(place) * replicas + replica : BATCH; }
  int split() const { return splits == 1 ? 0 : rank % splits; }
  bool owns(int place) const { return row(place) < BATCH && split() == 0; }
};

// Vectors: the weights of each output summed over inputs, by which a norm's mean is multiplied; biases; and what
// attention needs. The scales and biases of norms are part of the matrices that follow them.

struct alignas(16) HeadVectors {
  float qkv_sums[MOST_QKV_TILES * 16], qkv_bias[MOST_QKV_TILES * 16];
  u32 map[HEAD_DIM / 2 * FEATURES];  // φ's matrix: two neighbouring inputs for each feature
  float map_bias[FEATURES], query_scale[HEAD_DIM], key_scale[HEAD_DIM];
  float mixture[QUERIES * HEAD_DIM], mixture_bias[(QUERIES + 3) / 4 * 4];
};

struct Residual {  // for the channels of this rank: the bias of the branch; with norms after, those of the stream's norm
  float bias[MOST_STREAM_TILES * 16];
  float norm_scale[NORMS_AFTER * MOST_STREAM_TILES * 16 + 4], norm_bias[NORMS_AFTER * MOST_STREAM_TILES * 16 + 4];
};

struct alignas(16) Vectors {
  HeadVectors heads[MOST_HEADS];
  float up_sums[MOST_UP_TILES * 16], up_bias[MOST_UP_TILES * 16];
  Residual attention, feedforward;
};

struct Layer {
  int kind, rotary;  // which table of angles; -1: none
  const uint4* weights;
  const Vectors* vectors;
  float *S, *z;
  u32 *k, *v;   // the slots of a window, or a cache: two bfloat16 values each
  int* count;   // tokens so far: of each sequence for a window, of the batch for a cache
  unsigned char* valid;
};

constexpr int CHUNK_TILES = 16, CHUNK = CHUNK_TILES * 32;  // 16-byte values of a chunk
constexpr int REDUCED = 3;      // tiles whose partial sums are added up at once
constexpr int S_SIZE = FEATURES * HEAD_DIM, SLOT_WORDS = HEAD_DIM / 2;
constexpr int PAIRS = ROTATED / 2;  // of dimensions that are rotated together

struct Fixed {
  float4 partial[WARPS][REDUCED * ROWS * 4];
  float2 moments[WARPS][ROWS];           // Σ x and Σ x², over a warp's channels
  float2 norm[ROWS];                     // mean and 1 / deviation
  uint4 operand[OPERAND / 8 * ROWS];     // of the second product, as bfloat16: 16 channels of each row, then the next 16
  uint4 staged[(RANK_ROWS * ATTENDED > MOST_UP_TILES * UNIT_TILE * ROWS ? RANK_ROWS * ATTENDED
                                                                          : MOST_UP_TILES * UNIT_TILE * ROWS) / 8];
  alignas(16) float qkv[RANK_ROWS][MOST_QKV];
  alignas(16) float features[RANK_ROWS][QUERIES + 1][FEATURES];  // φ(q) of each query head, φ(k)
  alignas(16) float S[RANK_ROWS][S_SIZE], z[RANK_ROWS][FEATURES], new_z[RANK_ROWS][FEATURES];
  alignas(16) u32 window[HAS_WINDOW ? RANK_ROWS : 1][2][HAS_WINDOW ? WINDOW_SLOTS * SLOT_WORDS : 4];  // keys, values
  alignas(16) float leaving[RANK_ROWS][HEAD_DIM];                                 // the value that leaves the window
  float scores[RANK_ROWS][QUERIES][HAS_WINDOW ? WINDOW_SLOTS : 1];
  alignas(16) float distant[RANK_ROWS][QUERIES][HEAD_DIM + 4];                    // φ(q)·S, and φ(q)·z
  alignas(16) float parts[SPLITS > 1 ? SPLITS : 1][QUERIES][HEAD_DIM + 4];        // softmax over a part: numerators, sum, largest
  float angles[2][ROTARY_TABLES][RANK_ROWS][2][PAIRS > 0 ? PAIRS : 1];  // for softmax layers, and others: cosines, sines
  float keep[ROWS];
  int count[LAYERS][BATCH];
  alignas(16) Vectors vectors[2];  // of this layer, and of the next
  Layer layers[LAYERS];
  u32* clocks;
  int capacity;      // of caches, in tokens
  u32 streams_read;  // how often this block has read the stream
  u64 vector_barrier[2], state_barrier, qkv_barrier, parts_barrier, attended_barrier, hidden_barrier;
};

constexpr int FITTING_SLOTS = (SHARED_MEMORY - (int)sizeof(Fixed) - 256) / (CHUNK * 16 + 16);
constexpr int SLOTS = FITTING_SLOTS < MOST_SLOTS ? FITTING_SLOTS : MOST_SLOTS;
static_assert(SLOTS >= 4, "too large for shared memory");

// Loads are served in order: what a block reads after a barrier of all blocks waits for the weights that it is loading.
// If the ring holds a whole layer, nothing is gained by loading as early as possible, and slots are refilled only when
// the stream has been read.
constexpr int MOST_CHUNKS = MERGED_CHUNKS > LINEAR_CHUNKS ? MERGED_CHUNKS : LINEAR_CHUNKS;
constexpr bool PACED = PACES && (MOST_CHUNKS > SOFTMAX_CHUNKS ? MOST_CHUNKS : SOFTMAX_CHUNKS) + 2 <= SLOTS;

struct Shared {
  uint4 ring[SLOTS][CHUNK];
  Fixed fixed;
  u64 full[SLOTS], empty[SLOTS];
};
static_assert(sizeof(Shared) <= SHARED_MEMORY, "too large for shared memory");

// Small functions.

u32 to_bfloats(float2 x) { return to_bfloats(x.x, x.y); }
uint2 to_bfloats(float4 x) { return make_uint2(to_bfloats(x.x, x.y), to_bfloats(x.z, x.w)); }
float low_of(u32 both) { return __uint_as_float(both << 16); }
float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
float4 add(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }
float4 add(float4 x, float factor, float4 y) {  // x + factor · y
  return make_float4(x.x + factor * y.x, x.y + factor * y.y, x.z + factor * y.z, x.w + factor * y.w);
}
float4 scaled(float4 x, float scale) { return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale); }
float4& four_at(float* x) { return *(float4*)x; }
const float4& four_at(const float* x) { return *(const float4*)x; }

float sum_over_lanes(float x, int first, int last) {  // over lanes whose numbers differ in the bits first, …, last
  for (int lanes = first; lanes <= last; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}
float largest_over_lanes(float x, int first, int last) {
  for (int lanes = first; lanes <= last; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

float activated(float x) {
  if (ACTIVATION == RELU) return fmaxf(x, 0.f);
  if (ACTIVATION == SWISH) return x / (1 + expf(-x));
  if (ACTIVATION == GELU_EXACT) return 0.5f * x * (1 + erff(0.70710678f * x));
  return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

// With CLOCKS, one thread of each block notes the time at some points of each layer.
#ifdef CLOCKS
#define MARK(layer, point) \
  if (threadIdx.x == 0) fixed.clocks[(blockIdx.x * LAYERS + layer) * 9 + point] = read_clock()
#else
#define MARK(layer, point)
#endif

int warp() { return threadIdx.x / 32; }
int lane() { return threadIdx.x % 32; }
void sync() { sync_threads<1, COMPUTING>(); }  // of all threads that compute

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
        while (PACED && !has_ended(&shared.empty[slot], parity)) seen = wait_for_change(&shared.fixed.streams_read, seen);
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
          loaded[ahead][i / 2][i % 2] =
              step < STEPS && row < BATCH ? load_global(x + (step * ROWS + row) * 16 + lane() % 4 * 4) : make_float4(0, 0, 0, 0);
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
        const float total = sum_over_lanes(sum[i / 2][i % 2], 1, 2), total2 = sum_over_lanes(squares[i / 2][i % 2], 1, 2);
        if (lane() % 4 == 0) fixed.moments[warp()][lane() / 4 + 8 * i] = make_float2(total, total2);
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
      if (has(row)) {
        atomic_add(to + stream_index(row, channel), make_float4(s[0][half], s[0][half + 1], s[1][half], s[1][half + 1]));
      }
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

// Exchange: 8 values (16 bytes) of a row, from `staged`, to the operands of all ranks of the cluster.
void send_to_all(Shared& shared, int row, int channel, uint4 eight, int rank, const u64* barrier) {
  send(shared.fixed.operand + (channel / 16 * ROWS + row) * 2 + channel % 16 / 8, rank, eight, barrier);
}

// State: S and z, and the slots of a window, of this rank's sequences. One thread loads them ahead, and stores S and z.

struct StatePart {
  u32 S = S_SIZE * 4, z = FEATURES * 4, window = HAS_WINDOW ? WINDOW_SLOTS * SLOT_WORDS * 4 : 0;  // bytes
};

template <typename Use>
void for_each_state(const Role& role, int head, Use use) {  // use(place, index of the sequence's head)
  for (int place = 0; place < RANK_ROWS; place++) {
    if (role.row(place) < BATCH) use(place, role.row(place) * KV_HEADS + head);
  }
}

// The item after head `i` of a layer is the next head, or the first head of the next layer that has a state to load.
void load_state(Shared& shared, int layer, int i) {
  for (; layer < LAYERS; layer++, i = 0) {
    const Layer& own = shared.fixed.layers[layer];
    const Role role(own.kind);
    if (own.kind == SOFTMAX || i >= role.heads) continue;
    const StatePart part;
    const u32 slots = own.kind == WINDOWED ? part.window : 0;
    u32 bytes = 0;
    for_each_state(role, 0, [&](int, int) { bytes += part.S + part.z + 2 * slots; });
    u64* barrier = &shared.fixed.state_barrier;
    expect_bytes(barrier, bytes);
    for_each_state(role, role.head + i * CLUSTERS, [&](int place, int index) {
      load_async(shared.fixed.S[place], own.S + (u64)index * S_SIZE, part.S, barrier);
      load_async(shared.fixed.z[place], own.z + (u64)index * FEATURES, part.z, barrier);
      if (slots) {
        load_async(shared.fixed.window[place][0], own.k + (u64)index * (slots / 4), slots, barrier);
        load_async(shared.fixed.window[place][1], own.v + (u64)index * (slots / 4), slots, barrier);
      }
    });
    return;
  }
}

void store_state(Shared& shared, const Layer& layer, const Role& role, int head) {
  const StatePart part;
  for_each_state(role, head, [&](int place, int index) {
    store_async(layer.S + (u64)index * S_SIZE, shared.fixed.S[place], part.S);
    store_async(layer.z + (u64)index * FEATURES, shared.fixed.new_z[place], part.z);
  });
  commit_stores();
}

void load_vectors(Shared& shared, int layer) {
  if (layer >= LAYERS) return;
  u64* barrier = &shared.fixed.vector_barrier[layer % 2];
  expect_bytes(barrier, sizeof(Vectors));
  load_async(&shared.fixed.vectors[layer % 2], shared.fixed.layers[layer].vectors + blockIdx.x, sizeof(Vectors), barrier);
}

// Attention. Warps divide items among themselves: use(place, item) for `items` of each of this rank's sequences.
template <typename Use>
void for_each_by_warp(const Role& role, int items, Use use) {
  for (int i = warp(); i < RANK_ROWS * items; i += WARPS) {
    if (role.row(i / items) < BATCH) use(i / items, i % items);
  }
}

// Normalises and rotates queries and the key.
void prepare(Fixed& fixed, const Role& role, const Layer& layer, const HeadVectors& vectors) {
  for_each_by_warp(role, QUERIES + 1, [&](int place, int head) {
    float* x = fixed.qkv[place] + head * HEAD_DIM;
    if (QUERY_NORM) {
      const float* scale = head < QUERIES ? vectors.query_scale : vectors.key_scale;
      float squares = 0;
      for (int i = lane(); i < HEAD_DIM; i += 32) squares += x[i] * x[i];
      const float factor = rsqrtf(sum_over_lanes(squares, 1, 16) / HEAD_DIM + NORM_EPS);
      for (int i = lane(); i < HEAD_DIM; i += 32) x[i] *= factor * scale[i];
      __syncwarp();
    }
    if (layer.rotary >= 0) {
      const auto& angles = fixed.angles[layer.kind != SOFTMAX][layer.rotary][place];
      const float *cosines = angles[0], *sines = angles[1];
      for (int i = lane(); i < PAIRS; i += 32) {
        const float first = x[i], second = x[i + PAIRS];
        x[i] = first * cosines[i] - second * sines[i], x[i + PAIRS] = second * cosines[i] + first * sines[i];
      }
    }
  });
  sync();
}

bool leaves(const Fixed& fixed, int layer, int row) {
  return HAS_WINDOW && fixed.keep[row] > 0 && fixed.count[layer][row] >= WINDOW_SLOTS;
}

int slot_of(int position) {  // of a window: sinks have their own, later keys take turns in the others
  return position < SINKS ? position : SINKS + (position - SINKS) % (WINDOW_SLOTS - SINKS);
}

// φ of all queries, and of the key that enters S and z: the new one, or the one that leaves the window, if one does.
void map_features(Fixed& fixed, const Role& role, int layer, int kind, const HeadVectors& vectors) {
  for (int item = threadIdx.x; item < RANK_ROWS * (QUERIES + 1) * FEATURES; item += COMPUTING) {
    const int place = item / ((QUERIES + 1) * FEATURES), head = item / FEATURES % (QUERIES + 1), f = item % FEATURES;
    const int row = role.row(place);
    if (row >= BATCH) continue;
    const float* x = fixed.qkv[place] + head * (kind == MERGED ? FEATURES : HEAD_DIM);
    float result = 0;
    if (HAS_MERGED && kind == MERGED) {
      result = x[f];
    } else if (HAS_WINDOW && kind == WINDOWED && head == QUERIES) {
      const u32* old = fixed.window[place][0] + slot_of(fixed.count[layer][row]) * SLOT_WORDS;
      for (int i = 0; i < HEAD_DIM / 2; i++) {
        const u32 weights = vectors.map[i * FEATURES + f];
        result += low_of(weights) * low_of(old[i]) + high_of(weights) * high_of(old[i]);
      }
    } else {
      float even = 0, odd = 0;
#pragma unroll 8
      for (int i = 0; i < HEAD_DIM / 2; i++) {
        const u32 weights = vectors.map[i * FEATURES + f];
        const float2 pair = ((const float2*)x)[i];
        even += low_of(weights) * pair.x, odd += high_of(weights) * pair.y;
      }
      result = (even + odd) * (head < QUERIES ? QUERY_SCALE : 1);
    }
    if (kind != MERGED) result = fmaxf(result + vectors.map_bias[f], 0.f);
    const bool enters = kind == WINDOWED ? leaves(fixed, layer, row) : fixed.keep[row] > 0;
    fixed.features[place][head][f] = head < QUERIES || enters ? result : 0;
  }
  if (kind == WINDOWED) {
    for (int item = threadIdx.x; item < RANK_ROWS * HEAD_DIM; item += COMPUTING) {
      const int place = item / HEAD_DIM, d = item % HEAD_DIM, row = role.row(place);
      if (row >= BATCH) continue;
      const u32 both = fixed.window[place][1][slot_of(fixed.count[layer][row]) * SLOT_WORDS + d / 2];
      fixed.leaving[place][d] = leaves(fixed, layer, row) ? (d % 2 ? high_of(both) : low_of(both)) : 0;
    }
  }
  sync();
}

// Four attention outputs of one query head of a sequence, to be sent.
void stage(Fixed& fixed, int place, int query, int d, float4 four) {
  ((uint2*)fixed.staged)[(place * ATTENDED + query * HEAD_DIM + d) / 4] = to_bfloats(four);
}

// S + φ(k) ⊗ v and z + φ(k), and with them φ(q)·S and φ(q)·z. A warp has 16 columns of S: lanes are 8 parts of the
// features × 4 columns each. Without a window, the output is their quotient.
void linear_step(Fixed& fixed, const Role& role, int kind) {
  for_each_by_warp(role, HEAD_DIM / 16, [&](int place, int slab) {
    const int column = slab * 16 + lane() % 4 * 4;
    const float* value = kind == WINDOWED ? fixed.leaving[place]
                                          : fixed.qkv[place] + (kind == MERGED ? (QUERIES + 1) * FEATURES : (QUERIES + 1) * HEAD_DIM);
    const float4 v = four_at(value + column);
    float4 numerator[QUERIES] = {};
    float denominator[QUERIES] = {};
#pragma unroll
    for (int f = lane() / 4; f < FEATURES; f += 8) {
      const float k = fixed.features[place][QUERIES][f], z = fixed.z[place][f] + k;
      float4& S = four_at(&fixed.S[place][f * HEAD_DIM + column]);
      const float4 new_S = add(S, k, v);
      S = new_S;
      if (slab == 0 && lane() % 4 == 0) fixed.new_z[place][f] = z;
#pragma unroll
      for (int r = 0; r < QUERIES; r++) {
        const float q = fixed.features[place][r][f];
        numerator[r] = add(numerator[r], q, new_S);
        denominator[r] += q * z;
      }
    }
#pragma unroll
    for (int r = 0; r < QUERIES; r++) {
      float4& n = numerator[r];
      n = make_float4(sum_over_lanes(n.x, 4, 16), sum_over_lanes(n.y, 4, 16), sum_over_lanes(n.z, 4, 16),
                      sum_over_lanes(n.w, 4, 16));
      const float d = sum_over_lanes(denominator[r], 4, 16);
      if (lane() >= 4) continue;
      if (kind == WINDOWED) {
        four_at(&fixed.distant[place][r][column]) = n;
        if (slab == 0 && lane() == 0) fixed.distant[place][r][HEAD_DIM] = d;
      } else {
        stage(fixed, place, r, column, scaled(n, 1 / (NORMALIZER_CLAMPS ? fmaxf(d, NORMALIZER_VALUE) : d + NORMALIZER_VALUE)));
      }
    }
  });
}

// The new key and value take their slot of the window, in shared and in global memory.
void enter_window(Fixed& fixed, const Role& role, const Layer& layer, int number, int head) {
  for (int item = threadIdx.x; item < RANK_ROWS * 2 * SLOT_WORDS; item += COMPUTING) {
    const int place = item / (2 * SLOT_WORDS), which = item / SLOT_WORDS % 2, word = item % SLOT_WORDS, row = role.row(place);
    if (row >= BATCH || fixed.keep[row] == 0) continue;
    const float* x = fixed.qkv[place] + (QUERIES + which) * HEAD_DIM + 2 * word;
    const int slot = slot_of(fixed.count[number][row]) * SLOT_WORDS + word;
    fixed.window[place][which][slot] = to_bfloats(x[0], x[1]);
    (which ? layer.v : layer.k)[(u64)(row * KV_HEADS + head) * WINDOW_SLOTS * SLOT_WORDS + slot] = to_bfloats(x[0], x[1]);
  }
}

// Values of a key or value that a lane has: of 8 lanes, each an eighth.
constexpr int LANE_WORDS = HEAD_DIM / 16;
struct Eighth {
  u32 words[LANE_WORDS];
  Eighth() {}
  Eighth(const u32* vector) {
    const u32* own = vector + lane() % 8 * LANE_WORDS;
    if (LANE_WORDS % 4 == 0) {
#pragma unroll
      for (int i = 0; i < LANE_WORDS / 4; i++) ((uint4*)words)[i] = ((const uint4*)own)[i];
    } else {
#pragma unroll
      for (int i = 0; i < LANE_WORDS; i++) words[i] = own[i];
    }
  }
};

float dot(const float* q, const Eighth& k) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < LANE_WORDS; i++) sum += q[2 * i] * low_of(k.words[i]) + q[2 * i + 1] * high_of(k.words[i]);
  return sum;
}

// Exact scores of the keys in a window; a warp has four slots at once.
void window_scores(Fixed& fixed, const Role& role) {
  for_each_by_warp(role, (WINDOW_SLOTS + 3) / 4, [&](int place, int block) {
    const int slot = block * 4 + lane() / 8;
    const Eighth k(fixed.window[place][0] + (slot < WINDOW_SLOTS ? slot : 0) * SLOT_WORDS);
#pragma unroll
    for (int r = 0; r < QUERIES; r++) {
      const float score = sum_over_lanes(dot(fixed.qkv[place] + r * HEAD_DIM + lane() % 8 * 2 * LANE_WORDS, k), 1, 4);
      if (lane() % 8 == 0 && slot < WINDOW_SLOTS) fixed.scores[place][r][slot] = QUERY_SCALE * score;
    }
  });
  sync();
}

// Exact and distant keys under one normaliser: see t2r/attention/windowed.py.
void window_outputs(Fixed& fixed, const Role& role, int layer, const HeadVectors& vectors) {
  for_each_by_warp(role, QUERIES, [&](int place, int r) {
    const int row = role.row(place), count = fixed.count[layer][row] + (fixed.keep[row] > 0);
    const int filled = count < WINDOW_SLOTS ? count : WINDOW_SLOTS;
    const float* q = fixed.qkv[place] + r * HEAD_DIM;
    float* scores = fixed.scores[place][r];
    float mix = 0, largest = -1e30f, near = 0;
    for (int i = lane(); i < HEAD_DIM; i += 32) mix += q[i] * vectors.mixture[r * HEAD_DIM + i];
    for (int i = lane(); i < filled; i += 32) largest = fmaxf(largest, scores[i]);
    largest = largest_over_lanes(largest, 1, 16);
    mix = expf(fminf(sum_over_lanes(mix, 1, 16) + vectors.mixture_bias[r] - largest, MOST_MIXTURE));
    for (int i = lane(); i < filled; i += 32) {
      scores[i] = expf(scores[i] - largest);
      near += scores[i];
    }
    near = sum_over_lanes(near, 1, 16);
    __syncwarp();
    const float total = near + mix * fmaxf(fixed.distant[place][r][HEAD_DIM], 0.f), scale = 1 / (total > 0 ? total : 1);
    for (int d = lane() * 4; d < HEAD_DIM; d += 128) {
      float4 out = scaled(four_at(&fixed.distant[place][r][d]), mix);
      for (int slot = 0; slot < filled; slot++) {
        const uint2 v = *(const uint2*)&fixed.window[place][1][slot * SLOT_WORDS + d / 2];
        out = add(out, scores[slot], make_float4(low_of(v.x), high_of(v.x), low_of(v.y), high_of(v.y)));
      }
      stage(fixed, place, r, d, scaled(out, scale));
    }
  });
}

// Softmax over this rank's part of a sequence's cache. A warp has four positions at once, 8 lanes for each, and each
// keeps a running maximum. Then the 4 · WARPS results are merged, then those of the ranks that share the sequence.

constexpr int AT_ONCE = 4;  // positions of a lane that are loaded at once
constexpr int MOST_QUERIES = 64 / (2 * LANE_WORDS) > 0 ? 64 / (2 * LANE_WORDS) : 1;  // whose sums fit in registers
constexpr int QUERIES_AT_ONCE = QUERIES < MOST_QUERIES ? QUERIES : MOST_QUERIES;

struct RunningSoftmax {
  float largest = -1e30f, sum = 0, out[2 * LANE_WORDS] = {};

  void rescale(float new_largest) {
    const float factor = expf(largest - new_largest);
    largest = new_largest, sum *= factor;
#pragma unroll
    for (int i = 0; i < 2 * LANE_WORDS; i++) out[i] *= factor;
  }
};

void attend_to_cache(Fixed& fixed, const Role& role, const Layer& layer, int number, int head, int place, int first) {
  const int row = role.row(place), count = fixed.count[number][0], sequence = row * KV_HEADS + head;
  const u32* keys = layer.k + (u64)sequence * fixed.capacity * SLOT_WORDS;
  const u32* values = layer.v + (u64)sequence * fixed.capacity * SLOT_WORDS;
  const unsigned char* valid = layer.valid + (u64)row * fixed.capacity;
  float q[QUERIES_AT_ONCE][2 * LANE_WORDS];
  RunningSoftmax softmax[QUERIES_AT_ONCE];
#pragma unroll
  for (int r = 0; r < QUERIES_AT_ONCE; r++)
#pragma unroll
    for (int i = 0; i < 2 * LANE_WORDS; i++) {
      const int query = first + r < QUERIES ? first + r : 0;
      q[r][i] = QUERY_SCALE * fixed.qkv[place][query * HEAD_DIM + lane() % 8 * 2 * LANE_WORDS + i];
    }
  const int stride = role.splits * WARPS * 4;  // positions between two of a lane
  const int own = (role.split() * WARPS + warp()) * 4 + lane() / 8;
  for (int position0 = own - lane() / 8; position0 < count; position0 += stride * AT_ONCE) {
    Eighth k[AT_ONCE], v[AT_ONCE];
    bool allowed[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int position = position0 + lane() / 8 + i * stride, safe = position < count ? position : 0;
      k[i] = Eighth(keys + (u64)safe * SLOT_WORDS), v[i] = Eighth(values + (u64)safe * SLOT_WORDS);
      allowed[i] = position < count && valid[safe];
    }
#pragma unroll
    for (int r = 0; r < QUERIES_AT_ONCE; r++) {
      float scores[AT_ONCE], largest = softmax[r].largest;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        scores[i] = sum_over_lanes(dot(q[r], k[i]), 1, 4);
        if (allowed[i]) largest = fmaxf(largest, scores[i]);
      }
      softmax[r].rescale(largest);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float weight = allowed[i] ? expf(scores[i] - largest) : 0;
        softmax[r].sum += weight;
#pragma unroll
        for (int j = 0; j < LANE_WORDS; j++) {
          softmax[r].out[2 * j] += weight * low_of(v[i].words[j]);
          softmax[r].out[2 * j + 1] += weight * high_of(v[i].words[j]);
        }
      }
    }
  }
  // The new token is not in the cache yet.
  if (role.split() == 0 && warp() == 0 && fixed.keep[row] > 0) {
#pragma unroll
    for (int r = 0; r < QUERIES_AT_ONCE; r++) {
      const float *k = fixed.qkv[place] + QUERIES * HEAD_DIM + lane() % 8 * 2 * LANE_WORDS, *v = k + HEAD_DIM;
      float score = 0;
#pragma unroll
      for (int i = 0; i < 2 * LANE_WORDS; i++) score += q[r][i] * k[i];
      score = sum_over_lanes(score, 1, 4);
      if (lane() < 8) {
        softmax[r].rescale(fmaxf(softmax[r].largest, score));
        const float weight = expf(score - softmax[r].largest);
        softmax[r].sum += weight;
#pragma unroll
        for (int i = 0; i < 2 * LANE_WORDS; i++) softmax[r].out[i] += weight * v[i];
      }
    }
  }
  float* merged = (float*)fixed.partial[warp()];  // of this warp: for each query numerators, sum, largest
#pragma unroll
  for (int r = 0; r < QUERIES_AT_ONCE; r++) {
    softmax[r].rescale(largest_over_lanes(softmax[r].largest, 8, 16));
    const float sum = sum_over_lanes(softmax[r].sum, 8, 16);
    float* to = merged + r * (HEAD_DIM + 4);
#pragma unroll
    for (int i = 0; i < 2 * LANE_WORDS; i++) {
      const float out = sum_over_lanes(softmax[r].out[i], 8, 16);
      if (lane() < 8) to[lane() * 2 * LANE_WORDS + i] = out;
    }
    if (lane() == 0) to[HEAD_DIM] = sum, to[HEAD_DIM + 1] = softmax[r].largest;
  }
}
static_assert(QUERIES_AT_ONCE * (HEAD_DIM + 4) <= REDUCED * ROWS * 16, "unsupported sizes");

// Merges `count` results of a query, `stride` apart: four numerators over the sum; with `partly`, all of (numerators,
// sum, largest), four at once.
float4 merge(const float* parts, int count, int stride, int d, bool partly) {
  float largest = -1e30f, sum = 0;
  for (int i = 0; i < count; i++) largest = fmaxf(largest, parts[i * stride + HEAD_DIM + 1]);
  float4 out = make_float4(0, 0, 0, 0);
  for (int i = 0; i < count; i++) {
    const float factor = expf(parts[i * stride + HEAD_DIM + 1] - largest);
    sum += factor * parts[i * stride + HEAD_DIM];
    if (d < HEAD_DIM) out = add(out, factor, four_at(parts + i * stride + d));
  }
  if (!partly) return scaled(out, 1 / (sum > 0 ? sum : 1));
  return d < HEAD_DIM ? out : make_float4(sum, largest, 0, 0);
}

constexpr u32 PARTS_BYTES = SPLITS * QUERIES * (HEAD_DIM + 4) * 4;

void softmax_attention(Shared& shared, const Role& role, const Layer& layer, int number, int head, u32& exchanges) {
  Fixed& fixed = shared.fixed;
  constexpr int QUARTERS = HEAD_DIM / 4 + 1;
  for (int place = 0; place < RANK_ROWS; place++) {
    const int row = role.row(place);
    if (row >= BATCH) continue;
    for (int first = 0; first < QUERIES; first += QUERIES_AT_ONCE) {
      attend_to_cache(fixed, role, layer, number, head, place, first);
      sync();
      const int stride = sizeof(fixed.partial[0]) / 4;
      for (int item = threadIdx.x; item < QUERIES_AT_ONCE * QUARTERS; item += COMPUTING) {
        const int r = item / QUARTERS, d = item % QUARTERS * 4;
        if (first + r >= QUERIES) continue;
        const float* parts = (const float*)fixed.partial[0] + r * (HEAD_DIM + 4);
        if (SPLITS > 1) {
          const float4 part = merge(parts, WARPS, stride, d, true);
          send(&fixed.parts[role.split()][first + r][d], role.rank - role.split(), part, &fixed.parts_barrier);
        } else if (d < HEAD_DIM) {
          stage(fixed, place, first + r, d, merge(parts, WARPS, stride, d, false));
        }
      }
      sync();
    }
    if (SPLITS > 1 && role.owns(place)) {
      wait_for_sends(&fixed.parts_barrier, exchanges++ % 2);
      if (threadIdx.x == 0) expect_bytes(&fixed.parts_barrier, PARTS_BYTES);
      for (int item = threadIdx.x; item < QUERIES * HEAD_DIM / 4; item += COMPUTING) {
        const int r = item / (HEAD_DIM / 4), d = item % (HEAD_DIM / 4) * 4;
        stage(fixed, place, r, d, merge(fixed.parts[0][r], SPLITS, QUERIES * (HEAD_DIM + 4), d, false));
      }
    }
    if (role.owns(place)) {  // the new key and value, and whether the token is real
      const int count = fixed.count[number][0];
      for (int item = threadIdx.x; item < 2 * SLOT_WORDS; item += COMPUTING) {
        const float* x = fixed.qkv[place] + (QUERIES + item / SLOT_WORDS) * HEAD_DIM + item % SLOT_WORDS * 2;
        u32* to = (item < SLOT_WORDS ? layer.k : layer.v) + (u64)(row * KV_HEADS + head) * fixed.capacity * SLOT_WORDS;
        to[(u64)count * SLOT_WORDS + item % SLOT_WORDS] = to_bfloats(x[0], x[1]);
      }
      if (head == 0 && threadIdx.x == 0) layer.valid[(u64)row * fixed.capacity + count] = fixed.keep[row] > 0;
    }
  }
  sync();
}

void send_attended(Shared& shared, const Role& role) {
  constexpr int PIECES = ATTENDED / 8;
  for (int item = threadIdx.x; item < RANK_ROWS * PIECES * RANKS; item += COMPUTING) {
    const int place = item / (PIECES * RANKS), piece = item / RANKS % PIECES;
    if (!role.owns(place)) continue;
    send_to_all(shared, role.row(place), piece * 8, shared.fixed.staged[place * PIECES + piece], item % RANKS,
                &shared.fixed.attended_barrier);
  }
}

struct Exchanges { u32 qkv = 0, parts = 0, attended = 0, hidden = 0, states = 0; };  // how many there were

// Waits for messages of other ranks; then the next ones may come, of a number of bytes that depends on the layer.
void receive(u64* barrier, u32& count, u32 bytes) {
  if (threadIdx.x == 0) expect_bytes(barrier, bytes);
  wait_for_sends(barrier, count++ % 2);
}

void attention(Shared& shared, Weights& weights, const float* x, float* to, int number, Exchanges& exchanges) {
  Fixed& fixed = shared.fixed;
  const Layer& layer = fixed.layers[number];
  const Role role(layer.kind);
  const Vectors& vectors = fixed.vectors[number % 2];
  const bool has_norm = !NORMS_AFTER || number > 0;
  for (int i = 0; i < role.heads; i++) {
    const int head = role.head + i * CLUSTERS;
    const HeadVectors& own = vectors.heads[i];
    u32 rank_rows = 0;
    for (int place = 0; place < RANK_ROWS; place++) rank_rows += role.row(place) < BATCH;
    stream_product<pass_size(MOST_QKV_TILES)>(
        shared, weights, x, role.qkv_tiles(), has_norm, own.qkv_sums, own.qkv_bias,
        [&](int tile, int row, int output, float4 four) {
          if (!role.has(row)) return;
          const int index = (role.rank + tile * RANKS) * 16 + output, n = row / role.replicas;
          if (layer.kind == MERGED && index < (QUERIES + 1) * FEATURES) {
            four = make_float4(fmaxf(four.x, 0.f), fmaxf(four.y, 0.f), fmaxf(four.z, 0.f), fmaxf(four.w, 0.f));
          }
          for (int split = 0; split < role.splits; split++) {
            send(&fixed.qkv[role.place_of(n)][index], role.rank_of(n, split), four, &fixed.qkv_barrier);
          }
        });
    MARK(number, 1);
    const auto has = [&](int row) { return role.has(row); };
    if (head == 0) add_residual(shared, role, x, to, vectors.attention, has_norm, has);
    receive(&fixed.qkv_barrier, exchanges.qkv, rank_rows * role.qkv * 4);
    MARK(number, 2);
    if (layer.kind != MERGED) prepare(fixed, role, layer, own);
    if (HAS_SOFTMAX && layer.kind == SOFTMAX) {
      softmax_attention(shared, role, layer, number, head, exchanges.parts);
    } else {
      wait_for_loads(&fixed.state_barrier, exchanges.states++ % 2);
      map_features(fixed, role, number, layer.kind, own);
      linear_step(fixed, role, layer.kind);
      if (HAS_WINDOW && layer.kind == WINDOWED) {
        enter_window(fixed, role, layer, number, head);
        sync();
        window_scores(fixed, role);
        window_outputs(fixed, role, number, own);
      }
      fence_before_store();
      sync();
    }
    MARK(number, 3);
    send_attended(shared, role);
    const bool moves_state = threadIdx.x == 0 && layer.kind != SOFTMAX;
    if (moves_state) store_state(shared, layer, role, head);
    receive(&fixed.attended_barrier, exchanges.attended, role.rows() * ATTENDED * 2);
    MARK(number, 4);
    operand_product(shared, weights, role, ATTENDED, to, has);
    if (moves_state) {
      wait_until_read();
      load_state(shared, number, i + 1);
    }
    sync();
  }
}

void feed_forward(Shared& shared, Weights& weights, const float* x, float* to, int number, Exchanges& exchanges) {
  Fixed& fixed = shared.fixed;
  const Role role(fixed.layers[number].kind);
  const Vectors& vectors = fixed.vectors[number % 2];
  stream_product<pass_size(MOST_UP_TILES)>(shared, weights, x, role.up_tiles(), true, vectors.up_sums, vectors.up_bias,
                       [&](int tile, int row, int output, float4 four) {
    u32* own = (u32*)fixed.staged + (tile * ROWS + row) * (UNIT_TILE / 2);
    if (GATED) {  // two gates, then two units
      own[output / 4] = to_bfloats(activated(four.x) * four.z, activated(four.y) * four.w);
    } else {
      *(uint2*)(own + output / 2) =
          to_bfloats(make_float4(activated(four.x), activated(four.y), activated(four.z), activated(four.w)));
    }
  });
  MARK(number, 6);
  constexpr int PIECES = UNIT_TILE / 8;
  for (int item = threadIdx.x; item < role.up_tiles() * ROWS * PIECES * RANKS; item += COMPUTING) {
    const int piece = item / RANKS % PIECES, row = item / (RANKS * PIECES) % ROWS, tile = item / (RANKS * PIECES * ROWS);
    const int unit = (role.rank * role.up_tiles() + tile) * UNIT_TILE + piece * 8;
    if (row >= BATCH) continue;
    send_to_all(shared, row, unit, fixed.staged[(tile * ROWS + row) * PIECES + piece], item % RANKS, &fixed.hidden_barrier);
  }
  const auto has = [](int row) { return row < BATCH; };
  if (role.cluster == CLUSTERS - 1) add_residual(shared, role, x, to, vectors.feedforward, true, has);
  receive(&fixed.hidden_barrier, exchanges.hidden, BATCH * role.units() * 2);
  MARK(number, 7);
  operand_product(shared, weights, role, role.units(), to, has);
}

// A barrier of all blocks: what they have added to the stream before it can be read after it. A warp that has no other
// loads and stores in flight, for which it would have to wait, counts the blocks.

void sync_with_counting_warp() { sync_threads<2, COMPUTING + 32>(); }

void count_blocks(float* work) {
  u32* counters = (u32*)(work + 3 * ROWS * WIDTH);  // one for each rank, each in its own cache line
  for (int phase = 0; phase < 2 * LAYERS; phase++) {
    sync_with_counting_warp();
    if (lane() == 0) increment(counters + blockIdx.x % RANKS * 32);
    if (lane() < RANKS) wait_for_count(counters + lane() * 32, (phase + 1) * CLUSTERS);
    sync_with_counting_warp();
  }
}

void sync_blocks() {
  sync_with_counting_warp();
  sync_with_counting_warp();
}

// At the end: the numbers of tokens of windows and caches.
void count_tokens(const Fixed& fixed) {
  if (blockIdx.x > 0) return;
  for (int layer = 0; layer < LAYERS; layer++) {
    const Layer& own = fixed.layers[layer];
    if (own.kind == WINDOWED && threadIdx.x < BATCH) own.count[threadIdx.x] = fixed.count[layer][threadIdx.x] + (fixed.keep[threadIdx.x] > 0);
    if (own.kind == SOFTMAX && threadIdx.x == 0) own.count[0] = fixed.count[layer][0] + 1;
  }
}

void initialise(Shared& shared, const float* keep, const float* angles, const int* capacity) {
  Fixed& fixed = shared.fixed;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) init_barrier(&shared.full[i], 1), init_barrier(&shared.empty[i], WARPS);
    for (u64* barrier = fixed.vector_barrier; barrier <= &fixed.hidden_barrier; barrier++) init_barrier(barrier, 1);
    fence_barrier_init();
    expect_bytes(&fixed.parts_barrier, PARTS_BYTES);
    fixed.streams_read = 0, fixed.capacity = *capacity;
  }
  for (int i = threadIdx.x; i < ROWS; i += THREADS) fixed.keep[i] = i < BATCH ? keep[i] : 0;
  for (int i = threadIdx.x; i < LAYERS * BATCH; i += THREADS) {
    const Layer& layer = fixed.layers[i / BATCH];
    const bool counts = layer.kind == WINDOWED || layer.kind == SOFTMAX;
    fixed.count[i / BATCH][i % BATCH] = counts ? layer.count[layer.kind == WINDOWED ? i % BATCH : 0] : 0;
  }
  // The cosines and sines of the sequences that this rank has: in softmax layers others than elsewhere.
  constexpr int SIZE = 2 * PAIRS > 0 ? 2 * PAIRS : 1, PLACES = ROTARY_TABLES * RANK_ROWS;
  for (int i = threadIdx.x; i < 2 * PLACES * 2 * PAIRS; i += THREADS) {
    const int table = i / SIZE / RANK_ROWS % ROTARY_TABLES, row = Role(i / SIZE / PLACES ? LINEAR : SOFTMAX).row(i / SIZE % RANK_ROWS);
    if (row < BATCH) (&fixed.angles[0][0][0][0][0])[i] = angles[(table * BATCH + row) * SIZE + i % SIZE];
  }
}

KERNEL(RANKS, THREADS) decode_step(PARAMETERS) {
  SHARED(Shared, shared);
  Fixed& fixed = shared.fixed;
  if (threadIdx.x == 0) {
    const Layer layers[] = {LAYER_POINTERS};
#pragma unroll
    for (int i = 0; i < LAYERS; i++) fixed.layers[i] = layers[i];
#ifdef CLOCKS
    fixed.clocks = clocks;
#endif
  }
  __syncthreads();
  initialise(shared, keep, angles, capacity);
  __syncthreads();
  sync_cluster();
  if (warp() == LOADING_WARP) {
    if (lane() == 0) load_weights(shared);
    __syncwarp();
  } else if (warp() == COUNTING_WARP) {
    count_blocks(work);
  } else {
    if (threadIdx.x == 0) {
      load_vectors(shared, 0);
      load_state(shared, 0, 0);
    }
    Weights weights = {shared};
    Exchanges exchanges;
    for (int layer = 0; layer < LAYERS; layer++) {
      const int phase = 2 * layer;
      if (threadIdx.x == 0) load_vectors(shared, layer + 1);
      wait_for_loads(&fixed.vector_barrier[layer % 2], layer / 2 % 2);
      MARK(layer, 0);
      zero_share(stream_buffer(work, phase + 2));
      attention(shared, weights, stream_buffer(work, phase), stream_buffer(work, phase + 1), layer, exchanges);
      sync_blocks();
      MARK(layer, 5);
      zero_share(stream_buffer(work, phase + 3));
      feed_forward(shared, weights, stream_buffer(work, phase + 1), stream_buffer(work, phase + 2), layer, exchanges);
      sync_blocks();
      MARK(layer, 8);
      weights.next_layer(Role(fixed.layers[layer].kind));
    }
    count_tokens(fixed);
    if (threadIdx.x == 0) wait_until_stored();
  }
  __syncthreads();
  sync_cluster();  // no block ends while others may still send to it
}
