// all_layers.cu, part 1: sizes, which block computes what, shared memory, and small functions.
//
// all_layers.py defines the macros: the sizes in capitals that are not defined here.

// Of a layer's attention. Merged: φ is part of the matrices. Cross attention, to a source, is last.
enum Kind { MERGED, LINEAR, WINDOWED, SOFTMAX, CROSS_MERGED, CROSS_LINEAR, CROSS_SOFTMAX };
enum Activation { RELU, GELU, GELU_EXACT, SWISH };

constexpr int GROUPS = (BATCH + 15) / 16, ROWS = 16 * GROUPS;  // tensor cores multiply 16 sequences (rows) at once
constexpr int THREADS = 32 * WARPS;                            // of a block
constexpr int MOVER = THREADS - 32;  // the thread that moves vectors and states; its warp has least to multiply
constexpr int BLOCKS = CLUSTERS * RANKS;

// Item `index` of a deal of `total` items to `parts` gets every parts-th: how many that are.
constexpr int share(int total, int index, int parts) { return (total - index + parts - 1) / parts; }

// Tiles of matrices: 16 outputs × 16 inputs. Each of a warp's threads has 8 of its weights: bfloat16, or 8-bit integers
// (128 more, as bytes) with a scale for each output.
#if INT8
typedef uint2 Fragment;
#else
typedef uint4 Fragment;
#endif
constexpr int STEPS = WIDTH / 16;                                // tiles in a row of a product with the stream
constexpr int STREAM_TILES = WIDTH / 16;                         // of outputs that are channels of the stream
constexpr int UNIT_TILE = GATED ? 8 : 16;                        // units of a tile; with gates, each has two outputs
constexpr int UNIT_ROWS = FEEDFORWARD / (UNIT_TILE * RANKS);     // tiles for each rank, of all clusters together
constexpr int MOST_UP_TILES = (UNIT_ROWS + CLUSTERS - 1) / CLUSTERS;
constexpr int MOST_STREAM_TILES = share(STREAM_TILES, 0, RANKS);
constexpr int MOST_QKV_TILES = share(MOST_QKV / 16, 0, RANKS);
constexpr int MOST_HEADS = share(KV_HEADS * HEAD_PARTS, 0, CLUSTERS);  // of a cluster
constexpr int MOST_QUERIES = HAS_SOFTMAX ? QUERIES : QUERIES / HEAD_PARTS;  // of a head
constexpr int MOST_ATTENDED = MOST_QUERIES * HEAD_DIM;                      // their outputs
constexpr int MOST_UNITS = MOST_UP_TILES * RANKS * UNIT_TILE;    // of a cluster

// Chunks of an output tile, which are padded to CHUNK_TILES tiles. In a product with the stream a warp has every WARPS-th
// 16 channels, and a thread has registers for those of a round: if there are more rounds than one, x is read again for
// every REDUCED tiles, whose partial sums are added up at once. In the others a warp has all inputs of its output tiles:
// its chunks have tiles of OUTPUTS_AT_ONCE outputs in turn, for CHUNK_STEPS times 16 inputs.
constexpr int WARP_CHUNKS = share(share(STEPS, 0, WARPS), 0, CHUNK_TILES);
constexpr int ROUNDS = share(WARP_CHUNKS * CHUNK_TILES * GROUPS, 0, ROUND_OPERANDS > CHUNK_TILES * GROUPS
                                                                        ? ROUND_OPERANDS : CHUNK_TILES * GROUPS);
constexpr int ROUND_CHUNKS = share(WARP_CHUNKS, 0, ROUNDS), ROUND_STEPS = ROUND_CHUNKS * CHUNK_TILES;
constexpr int STREAM_CHUNKS = ROUNDS * ROUND_CHUNKS;
constexpr int CHUNK_STEPS = CHUNK_TILES / OUTPUTS_AT_ONCE;
constexpr int operand_chunks(int inputs) { return share(inputs / 16, 0, CHUNK_STEPS); }
constexpr int OPERAND = operand_chunks(MOST_ATTENDED > MOST_UNITS ? MOST_ATTENDED : MOST_UNITS) * CHUNK_STEPS * 16;

static_assert(WIDTH % 16 == 0 && HEAD_DIM % 16 == 0 && FEATURES % 16 == 0, "unsupported sizes");
static_assert(FEEDFORWARD % (UNIT_TILE * RANKS) == 0 && RANKS * UNIT_TILE % 16 == 0, "unsupported sizes");
static_assert(RANKS <= 32, "unsupported sizes");

// Softmax layers read a cache that grows. Where clusters are left over, several REPLICAS have the same head and share
// the sequences; and where ranks are left over, SPLITS of them share a sequence, each with a part of the cache.
constexpr int REPLICAS = KV_HEADS < CLUSTERS ? CLUSTERS / KV_HEADS : 1;
constexpr int REPLICA_ROWS = share(BATCH, 0, REPLICAS);
constexpr int SPLITS = HAS_SOFTMAX && RANKS > REPLICA_ROWS ? RANKS / REPLICA_ROWS : 1;
constexpr int RANK_ROWS = share(BATCH, 0, RANKS);                // sequences of a rank, at most

constexpr bool is_cross(int kind) { return TRANSLATES && kind >= CROSS_MERGED; }
constexpr bool is_merged(int kind) { return HAS_MERGED && (kind == MERGED || (TRANSLATES && kind == CROSS_MERGED)); }
constexpr bool is_softmax(int kind) { return HAS_SOFTMAX && (kind == SOFTMAX || (TRANSLATES && kind == CROSS_SOFTMAX)); }
constexpr int sharing(int kind) { return is_cross(kind) ? SHARING : 1; }  // sequences with the same source

// What a block computes in a layer. In softmax layers other blocks have heads and sequences than in the rest. What
// depends on that alone is constant: indices are divided by it everywhere.
//
// In layers that are not softmax, HEAD_PARTS clusters have the same key/value head: each one some of its queries and all
// of its state, which the first of them stores. Such a part is what is called a head below.
template <bool IS_SOFTMAX>
struct Role {
  static constexpr int parts = IS_SOFTMAX ? 1 : HEAD_PARTS, all_heads = KV_HEADS * parts, queries = QUERIES / parts;
  static constexpr int replicas = IS_SOFTMAX ? REPLICAS : 1, splits = IS_SOFTMAX ? SPLITS : 1;
  static constexpr int attended = queries * HEAD_DIM;  // outputs of a head's queries
  int cluster = blockIdx.x / RANKS, rank = blockIdx.x % RANKS;
  int head, heads;  // the first, and how many
  int replica;
  int qkv;          // outputs of a head's projections: queries, key and value, or φ of them; cross attention: queries
  bool has_units;   // a feed-forward; in translation, after a source

  Role(int kind)
      : head(replicas > 1 ? cluster % KV_HEADS : cluster),
        heads(replicas > 1 ? cluster < KV_HEADS * replicas : share(all_heads, cluster, CLUSTERS)),
        replica(replicas > 1 ? cluster / KV_HEADS : 0),
        qkv((queries + !is_cross(kind)) * (is_merged(kind) ? FEATURES : HEAD_DIM) + (is_cross(kind) ? 0 : HEAD_DIM)),
        has_units(!TRANSLATES || is_cross(kind)) {}

  int qkv_tiles() const { return share(qkv / 16, rank, RANKS); }
  int up_tiles() const {
    return has_units ? UNIT_ROWS / CLUSTERS + (cluster >= CLUSTERS - UNIT_ROWS % CLUSTERS) : 0;
  }
  int stream_tiles() const { return share(STREAM_TILES, rank, RANKS); }
  int units() const { return up_tiles() * RANKS * UNIT_TILE; }
  int outputs(int warp) const { return share(stream_tiles(), warp, WARPS) / OUTPUTS_AT_ONCE; }
  int chunks(int warp) const {  // that a warp reads in the whole layer
    return (heads * qkv_tiles() + up_tiles()) * STREAM_CHUNKS +
           outputs(warp) * (heads * operand_chunks(attended) + operand_chunks(units()));
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
typedef Role<false> StateRole;
typedef Role<true> CacheRole;

// Vectors: of products, biases, and what attention needs. The scales and biases of norms are part of the matrices that
// follow them.

template <int TILES>
struct Outputs {                                // of a product with the stream
  float sums[TILES * 16], bias[TILES * 16];     // sums of weights over inputs: a norm's mean is multiplied by them
  float scale[INT8 * TILES * 16 + 4 * !INT8];   // of 8-bit weights
};

struct alignas(16) HeadVectors {
  Outputs<MOST_QKV_TILES> qkv;
  u32 map[HEAD_DIM / 2 * FEATURES];  // φ's matrix: two neighbouring inputs for each feature
  float map_bias[FEATURES], query_scale[HEAD_DIM], key_scale[HEAD_DIM];
  float mixture[MOST_QUERIES * HEAD_DIM], mixture_bias[(MOST_QUERIES + 3) / 4 * 4];
};

struct Residual {  // for this rank's channels: the branch's bias; with norms after, the stream's norm
  float bias[MOST_STREAM_TILES * 16], scale[INT8 * MOST_STREAM_TILES * 16 + 4 * !INT8];
  float norm_scale[NORMS_AFTER * MOST_STREAM_TILES * 16 + 4], norm_bias[NORMS_AFTER * MOST_STREAM_TILES * 16 + 4];
};

struct alignas(16) Vectors {
  HeadVectors heads[MOST_HEADS];
  Outputs<MOST_UP_TILES> up;
  Residual attention, feedforward;
};

struct Layer {
  int kind, rotary;  // which table of angles; -1: none
  int features;      // of its state; those beyond are always zero
  const Fragment* weights;
  int chunks;  // that a warp's weights have room for
  const Vectors* vectors;
  float *S, *z;
  u32 *k, *v;   // the slots of a window, or a cache: two bfloat16 values each
  int* count;   // tokens so far: of each sequence for a window; for a cache of the batch, or with OWN_LENGTHS of each
  unsigned char* valid;
};

constexpr int CHUNK = CHUNK_TILES * 32;  // fragments of a chunk of weights, which is loaded at once
constexpr int S_SIZE = FEATURES * HEAD_DIM, SLOT_WORDS = HEAD_DIM / 2;
constexpr int PAIRS = ROTATED / 2;  // of dimensions that are rotated together

struct Fixed {
  float4 partial[WARPS][REDUCED * ROWS * 4];
  float2 moments[WARPS][ROWS];           // Σ x and Σ x², over a warp's channels
  float2 norm[ROWS];                     // mean and 1 / deviation
  uint4 operand[OPERAND / 8 * ROWS];     // of the second product: 16 channels of each row, then the next 16
  uint4 staged[(RANK_ROWS * MOST_ATTENDED > MOST_UP_TILES * UNIT_TILE * ROWS ? RANK_ROWS * MOST_ATTENDED
                                                                              : MOST_UP_TILES * UNIT_TILE * ROWS) / 8];
  alignas(16) float qkv[RANK_ROWS][MOST_QKV];
  alignas(16) float features[RANK_ROWS][MOST_QUERIES + 1][FEATURES];  // φ(q) of each query head, φ(k)
  alignas(16) float S[RANK_ROWS][S_SIZE], z[RANK_ROWS][FEATURES], new_z[RANK_ROWS][FEATURES];
  alignas(16) u32 window[HAS_WINDOW ? RANK_ROWS : 1][2][HAS_WINDOW ? WINDOW_SLOTS * SLOT_WORDS : 4];  // keys, values
  alignas(16) float leaving[RANK_ROWS][HEAD_DIM];                                 // the value that leaves the window
  float scores[RANK_ROWS][MOST_QUERIES][HAS_WINDOW ? WINDOW_SLOTS : 1];
  alignas(16) float distant[RANK_ROWS][MOST_QUERIES][HEAD_DIM + 4];                    // φ(q)·S, and φ(q)·z
  alignas(16) float parts[SPLITS][QUERIES][HEAD_DIM + 4];  // softmax over a part: numerators, sum, largest
  float angles[2][ROTARY_TABLES][RANK_ROWS][2][PAIRS > 0 ? PAIRS : 1];  // softmax layers, others: cosines, sines
  float keep[ROWS];
  int count[LAYERS][BATCH];
  int chunks[LAYERS][WARPS];  // that each warp reads
  alignas(16) Vectors vectors[2];  // of this layer, and of the next
  Layer layers[LAYERS];
  u32* clocks;
  int capacity[2];   // in tokens, of caches, and of sources
  u64 vector_barrier[2], state_barrier, qkv_barrier, parts_barrier, attended_barrier, hidden_barrier;
};

// Each warp has a ring of weights. Where it has few chunks of a layer, a slot of the ring has several.
constexpr int FITTING_CHUNKS =
    (SHARED_MEMORY - (int)sizeof(Fixed) - 256) / (WARPS * (CHUNK * (int)sizeof(Fragment) + 8));
constexpr int SLOT_CHUNKS = LARGE || FITTING_CHUNKS < 6 ? 1 : FITTING_CHUNKS < 9 ? 2 : 3;  // three slots fit
constexpr int FITTING_SLOTS = FITTING_CHUNKS / SLOT_CHUNKS;
constexpr int SLOTS = FITTING_SLOTS < MOST_SLOTS ? FITTING_SLOTS : MOST_SLOTS;
static_assert(SLOTS >= 2, "too large for shared memory");

struct Shared {
  alignas(128) Fragment ring[WARPS][SLOTS * SLOT_CHUNKS * CHUNK];
  Fixed fixed;
  u64 loaded[WARPS][SLOTS];
};
static_assert(sizeof(Shared) <= SHARED_MEMORY, "too large for shared memory");

// Which messages come next: barriers have two phases in turn, even and odd. All in one register.
enum Exchange { QKV, PARTS, ATTENDED, HIDDEN, STATES };

struct Exchanges {
  u32 parities = 0;

  u32 parity(Exchange which) const { return parities >> which & 1; }
  u32 next(Exchange which) {
    const u32 now = parity(which);
    parities ^= 1u << which;
    return now;
  }
};

// Small functions.

u32 to_bfloats(float2 x) { return to_bfloats(x.x, x.y); }
uint2 to_bfloats(float4 x) { return make_uint2(to_bfloats(x.x, x.y), to_bfloats(x.z, x.w)); }
float low_of(u32 both) { return __uint_as_float(both << 16); }
float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
float4 add(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }
float4 add(float4 x, float factor, float4 y) {  // x + factor · y
  return make_float4(x.x + factor * y.x, x.y + factor * y.y, x.z + factor * y.z, x.w + factor * y.w);
}
float4 multiplied(float4 x, float4 y) { return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w); }
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

// With CLOCK_POINTS, one thread of each block notes the time at some points of each layer.
#ifdef CLOCK_POINTS
#define MARK(layer, point) \
  if (threadIdx.x == 0) fixed.clocks[(blockIdx.x * LAYERS + layer) * CLOCK_POINTS + point] = read_clock()
#else
#define MARK(layer, point)
#endif

int warp() { return threadIdx.x / 32; }
int lane() { return threadIdx.x % 32; }
void sync() { sync_threads<1, THREADS>(); }
