// All layers of a decoding step of T2R in one kernel, by the functions of hopper.cuh.
//
// Thread blocks, one on each multiprocessor, form clusters of 8 ranks. Blocks of a cluster write into each other's
// shared memory. Blocks of different clusters can synchronise only through global memory, which takes several times as
// long. So each cluster computes a part of each layer that begins and ends with the residual stream: one head, if there
// is one for it, and some of the feed-forward units.
//
//   norm, queries, keys, values   a rank has a slice of the stream's channels; partial sums go to a sequence's rank
//   recurrent step                a rank has two sequences; their attention outputs go to all ranks
//   output projection             a rank has a slice of the outputs; clusters add their results to the stream
//   norm, feed-forward up         like the first; partial sums go to a unit's rank, whose result goes to all ranks
//   feed-forward down             like the third
//
// A rank reads and updates the same slice of the stream, so only blocks of equal rank synchronise across clusters,
// twice a layer. Loads are served in order: what a block reads after such a barrier would wait for all loads that it
// has issued before. So matrices are loaded between barriers, and threads have them in registers when a barrier ends.
//
// Macros that one_kernel.py defines: LAYERS, WIDTH, HEADS, FEATURES, HEAD_DIM, CLUSTERS, UNITS (of the feed-forward,
// per cluster), BATCH, NORM_EPS, NORMALIZER_CLAMPS, NORMALIZER_VALUE, SHARED_MEMORY (bytes), PARAMETERS (of the
// kernel), and STATE_POINTERS (those of S and z of each layer).

constexpr int SEQUENCES = 16, RANKS = 8, WARPS = 9;
constexpr int THREADS = 32 * (WARPS + 1);            // the last warp loads from global memory
constexpr int SLICE = WIDTH / RANKS;                 // channels of the stream, per rank
constexpr int QKV = 2 * FEATURES + HEAD_DIM;         // outputs of a head's projections: φ(q), φ(k), value
constexpr int RANK_UNITS = UNITS / RANKS;            // feed-forward units, per rank
constexpr int RANK_SEQUENCES = SEQUENCES / RANKS;    // sequences whose recurrent step a rank computes
constexpr int THREAD_FEATURES = FEATURES / 4;        // rows of S of which a thread updates four columns
constexpr int STEP_THREADS = 128 * RANK_SEQUENCES;   // threads that compute the recurrent step
constexpr int COUNTING_THREAD = STEP_THREADS;        // increments counters and waits for them; not one of these
constexpr int LOADING_THREAD = THREADS - 1;          // loads vectors and states, and stores states

static_assert(SLICE == 128 && HEAD_DIM == 128 && QKV % 32 == 0 && UNITS % 32 == 0, "unsupported sizes");
static_assert(FEATURES % 8 == 0 && FEATURES <= 32 && HEADS <= CLUSTERS && CLUSTERS <= SEQUENCES, "unsupported sizes");
static_assert(RANKS == 8 && RANK_SEQUENCES == 2 && STEP_THREADS < 32 * WARPS && RANK_UNITS == 4 * WARPS,
              "unsupported sizes");

// Activations of 16 sequences, in the layout of tensor cores: 16 bytes hold four channels of sequences s and s + 8,
// first two channels of both, then the other two. Padding between sequences avoids conflicts of shared-memory banks.

constexpr int stride_of(int channels) { return channels / 4 + 4; }

template <int CHANNELS>
struct Activations {
  uint4 all[8 * stride_of(CHANNELS)];

  uint4* at(int s, int channel) { return all + s * stride_of(CHANNELS) + channel / 4; }
  const uint4* at(int s, int channel) const { return all + s * stride_of(CHANNELS) + channel / 4; }
};

uint4 interleave(uint2 first, uint2 second) { return make_uint4(first.x, second.x, first.y, second.y); }

// A block's matrices are loaded in chunks, into a ring buffer of SLOTS: each chunk replaces the one SLOTS before it. A
// chunk is 32 outputs × 128 inputs, or 128 × 32. It consists of fragments, 8 outputs × 32 inputs, 16 bytes for each of
// a warp's 32 threads.

constexpr int FRAGMENTS = 16;  // in a chunk
constexpr int SLOTS = 19;      // as many as fit in shared memory

constexpr int chunks_for(int outputs, int inputs) { return outputs * inputs / (FRAGMENTS * 8 * 32); }

constexpr int QKV_CHUNKS = chunks_for(QKV, SLICE), OUT_CHUNKS = chunks_for(SLICE, HEAD_DIM);
constexpr int UP_CHUNKS = chunks_for(UNITS, SLICE), DOWN_CHUNKS = chunks_for(SLICE, UNITS);
constexpr int HEAD_CHUNKS = QKV_CHUNKS + OUT_CHUNKS, FEED_CHUNKS = UP_CHUNKS + DOWN_CHUNKS;

// Slots are refilled after each barrier, with one exception: some before the first barrier of a layer.
constexpr int QKV_REFILLS_BEFORE_BARRIER = 4;
// Slots of the feed-forward that are refilled after the first barrier; the others follow after the second. These
// receive the last of the next layer's QKV chunks.
constexpr int EARLY_FEED_REFILLS = QKV_CHUNKS + FEED_CHUNKS - SLOTS;

// Vectors of a block: the weights of each output summed over inputs, by which a norm's mean is multiplied, and biases.

struct HeadVectors {
  float weight_sums[QKV], bias[QKV];
};

struct FeedVectors {
  float weight_sums[RANK_UNITS], bias[RANK_UNITS], down_bias[SLICE], out_bias[SLICE];
};

struct Shared {
  uint4 chunks[SLOTS][FRAGMENTS * 32];
  Activations<SLICE> stream;
  union {
    Activations<HEAD_DIM> attended;
    Activations<UNITS> hidden;
  };
  union {  // partial sums of products, from each rank; here and below, + 16 and + 4 avoid bank conflicts
    float qkv_sums[RANKS][RANK_SEQUENCES][QKV], up_sums[RANKS][2][8 * RANK_UNITS + 16];
  };
  HeadVectors head_vectors[2];  // of this layer, and of the next
  FeedVectors feed_vectors[2];
  float2 moments[RANKS][SEQUENCES];  // Σ x and Σ x² of a sequence, over each rank's slice
  float keep[SEQUENCES], qkv[RANK_SEQUENCES][QKV + 4];
  float S[RANK_SEQUENCES][FEATURES * HEAD_DIM + 16], z[RANK_SEQUENCES][FEATURES + 4], new_z[RANK_SEQUENCES][FEATURES];
  float* states[2 * LAYERS];
  u64 chunk_barrier[SLOTS], vector_barrier[2], state_barrier;
  u64 qkv_barrier, attended_barrier, up_barrier, hidden_barrier;
};

static_assert(sizeof(Shared) <= SHARED_MEMORY, "unsupported sizes");

// Bytes that a block receives from its cluster in one phase of a barrier.
constexpr u32 MOMENT_BYTES = sizeof(Shared::moments);
constexpr u32 QKV_BYTES = sizeof(Shared::qkv_sums) + MOMENT_BYTES;
constexpr u32 UP_BYTES = RANKS * SEQUENCES * RANK_UNITS * 4 + MOMENT_BYTES;
constexpr u32 ATTENDED_BYTES = SEQUENCES * HEAD_DIM * 2, HIDDEN_BYTES = SEQUENCES * UNITS * 2;

void receive(u64* barrier, int layer, u32 bytes) {
  wait_for_sends(barrier, layer % 2);
  if (threadIdx.x == 0) expect_bytes(barrier, bytes);  // in the next phase
}

// What a block computes, and where its matrices and vectors are in global memory.

struct Role {
  const uint4 *head_chunks, *feed_chunks;
  const HeadVectors* head_vectors;
  const FeedVectors* feed_vectors;
  int cluster = blockIdx.x / RANKS, rank = blockIdx.x % RANKS;

  bool has_head() const { return cluster < HEADS; }
  int layer_chunks() const { return has_head() * HEAD_CHUNKS + FEED_CHUNKS; }

  const uint4* chunk(int number) const {
    const int layer = has_head() ? number / (HEAD_CHUNKS + FEED_CHUNKS) : number / FEED_CHUNKS;
    const int feed_chunk = number - layer * layer_chunks() - has_head() * HEAD_CHUNKS;  // negative: one of the head
    const u64 before = (u64)blockIdx.x * LAYERS + layer;
    return feed_chunk < 0 ? head_chunks + (before * HEAD_CHUNKS + HEAD_CHUNKS + feed_chunk) * FRAGMENTS * 32
                          : feed_chunks + (before * FEED_CHUNKS + feed_chunk) * FRAGMENTS * 32;
  }
};

void load_chunk(Shared& shared, const Role& role, int number) {
  if (number >= LAYERS * role.layer_chunks()) return;
  u64* barrier = &shared.chunk_barrier[number % SLOTS];
  expect_bytes(barrier, sizeof(shared.chunks[0]));
  load_async(shared.chunks[number % SLOTS], role.chunk(number), sizeof(shared.chunks[0]), barrier);
}

void wait_for_chunks(Shared& shared, int first, int count) {  // each thread of a warp waits for one
  const int number = first + threadIdx.x % 32;
  if (number < first + count) wait_for_loads(&shared.chunk_barrier[number % SLOTS], number / SLOTS % 2);
  __syncwarp();
}

// Refills the slots of these chunks, which all threads have read; each thread of the last warp loads one chunk.
void refill_slots(Shared& shared, const Role& role, int first, int count) {
  const int number = first + (int)threadIdx.x - 32 * WARPS;
  if (threadIdx.x >= 32 * WARPS && number < first + count) load_chunk(shared, role, number + SLOTS);
}

void load_vectors(Shared& shared, const Role& role, int layer) {
  if (layer >= LAYERS) return;
  u64* barrier = &shared.vector_barrier[layer % 2];
  const int index = blockIdx.x * LAYERS + layer;
  expect_bytes(barrier, role.has_head() * sizeof(HeadVectors) + sizeof(FeedVectors));
  if (role.has_head()) {
    load_async(&shared.head_vectors[layer % 2], role.head_vectors + index, sizeof(HeadVectors), barrier);
  }
  load_async(&shared.feed_vectors[layer % 2], role.feed_vectors + index, sizeof(FeedVectors), barrier);
}

// The product of 16 sequences with a matrix; each warp computes 32 outputs. Inputs are multiplied in steps of 32.
// Threads load most of the weights into registers before the activations have arrived.

template <int OUTPUTS, int INPUTS>
struct Product {
  static constexpr int ACTIVE_WARPS = OUTPUTS / 32, STEPS = INPUTS / 32;
  static constexpr int PRELOADED = 4;  // steps whose weights are loaded in advance
  static constexpr int AHEAD = 2;      // steps between loading and multiplying, for the others and for activations
  static constexpr bool CHUNK_PER_WARP = STEPS == 4;  // a chunk is 32 outputs × 128 inputs; otherwise 128 × 32, a step
  static_assert(OUTPUTS % 32 == 0 && ACTIVE_WARPS <= WARPS && STEPS <= SLOTS && (CHUNK_PER_WARP || ACTIVE_WARPS == 4),
                "not whole chunks");
  uint4 weights[STEPS][4];  // for each step, four fragments
  float sums[4][4];

  static int warp() { return threadIdx.x / 32; }
  static bool is_active() { return warp() < ACTIVE_WARPS; }

  // Loads the weights of a step into registers; `first` is the number of the matrix's first chunk.
  void load_step(Shared& shared, int first, int step) {
    const int number = CHUNK_PER_WARP ? first + warp() : first + step, part = CHUNK_PER_WARP ? step : warp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      weights[step][i] = shared.chunks[number % SLOTS][(part * 4 + i) * 32 + threadIdx.x % 32];
    }
  }

  void preload(Shared& shared, int first, bool needed = true) {
#pragma unroll
    for (int i = 0; i < 4 * PRELOADED; i++) weights[i / 4][i % 4] = {};  // else the compiler keeps the old values alive
    if (!is_active() || !needed) return;
    wait_for_chunks(shared, CHUNK_PER_WARP ? first + warp() : first, CHUNK_PER_WARP ? 1 : STEPS);
#pragma unroll
    for (int step = 0; step < PRELOADED; step++) load_step(shared, first, step);
  }

  void multiply(Shared& shared, const Activations<INPUTS>& activations, int first) {
#pragma unroll
    for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0;
    if (!is_active()) return;
    const int lane = threadIdx.x % 32;
    const uint4* own = activations.at(lane / 4, lane % 4 * 4);
    uint4 low[STEPS], high[STEPS];  // inputs 0 to 15 and 16 to 31 of a step
    const auto load_activations = [&](int step) { low[step] = own[step * 8], high[step] = own[step * 8 + 4]; };
#pragma unroll
    for (int step = 0; step < AHEAD; step++) load_activations(step);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if (step + AHEAD < STEPS) load_activations(step + AHEAD);
      if (step >= PRELOADED - AHEAD && step + AHEAD < STEPS) load_step(shared, first, step + AHEAD);
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_add(sums[i], low[step], weights[step][i].x, weights[step][i].y);
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_add(sums[i], high[step], weights[step][i].z, weights[step][i].w);
    }
  }

  // Calls use(sequence, first output, four outputs) for all results of this thread.
  template <typename Use>
  void for_each_result(Use use) const {
    if (!is_active()) return;
#pragma unroll
    for (int i = 0; i < 4; i += 2)
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        const int sequence = threadIdx.x % 32 / 4 + 4 * half, output = warp() * 32 + i * 8 + threadIdx.x % 4 * 4;
        use(sequence, output, make_float4(sums[i][half], sums[i][half + 1], sums[i + 1][half], sums[i + 1][half + 1]));
      }
  }
};

uint2 to_bfloats(float4 x) { return make_uint2(to_bfloats(x.x, x.y), to_bfloats(x.z, x.w)); }

float4 add(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }

// x + factor · y
float4 add(float4 x, float factor, float4 y) {
  return make_float4(x.x + factor * y.x, x.y + factor * y.y, x.z + factor * y.z, x.w + factor * y.w);
}

float4 scaled(float4 x, float scale) { return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale); }

float4 relu(float4 x) { return make_float4(fmaxf(x.x, 0.f), fmaxf(x.y, 0.f), fmaxf(x.z, 0.f), fmaxf(x.w, 0.f)); }

float4& four_at(float* x) { return *(float4*)x; }
const float4& four_at(const float* x) { return *(const float4*)x; }

// The residual stream. All blocks of a rank hold the same slice of it, in registers: warp s has sequences s and s + 8,
// and a thread four channels of each. A layer has two phases, each of which ends with an update of the stream. Blocks
// add up an update in one of three buffers in global memory: others may still read the buffer of the phase before,
// while the third is set to zero for the phase after. The work space is the stream, the three buffers, and a counter
// for each rank.

float* update_at(float* work, int phase, int sequence, int channel) {
  return work + ((1 + phase % 3) * SEQUENCES + sequence) * WIDTH + channel;
}

struct Stream {
  float4 x[2];
  const int s = threadIdx.x / 32, lane = threadIdx.x % 32, channel = lane * 4, slice;

  Stream(const float* work, const Role& role) : slice(role.rank * SLICE) {
    for_each([&](int sequence, float4& x, int) { x = four_at(work + sequence * WIDTH + slice + channel); });
  }

  // Calls use(sequence, its four channels, 0 or 1) for both sequences of this thread.
  template <typename Use>
  void for_each(Use use) {
    if (s >= 8) return;
#pragma unroll
    for (int i = 0; i < 2; i++) use(s + 8 * i, x[i], i);
  }

  // A barrier of all blocks of this rank, after which their updates and `bias` are added to x; runs `meanwhile` while
  // it waits. The counting thread has no loads or stores in flight: it would have to wait for these too.
  template <typename Work>
  void synchronise(float* work, int phase, const Role& role, const float* bias, Work meanwhile) {
    u32* counter = (u32*)(work + 4 * SEQUENCES * WIDTH) + role.rank * 32;
    __syncthreads();
    if (threadIdx.x == COUNTING_THREAD) increment(counter);
    meanwhile();
    if (threadIdx.x == COUNTING_THREAD) wait_for_count(counter, (phase + 1) * CLUSTERS);
    __syncthreads();
    float4 update[2];
    for_each([&](int sequence, float4&, int i) {
      update[i] = load_global(update_at(work, phase, sequence, slice + channel));
    });
    for_each([&](int sequence, float4& x, int i) {
      x = add(add(x, update[i]), four_at(bias + channel));
      if (sequence % CLUSTERS == role.cluster)
        four_at(update_at(work, phase + 2, sequence, slice + channel)) = make_float4(0, 0, 0, 0);
    });
  }

  // Writes x as activations for this block's products, and sends the moments of its slice to all ranks, for the norm.
  void publish(Shared& shared, const Role& role, u64* barrier) {
    if (s < 8) {
      *shared.stream.at(s, channel) = interleave(to_bfloats(x[0]), to_bfloats(x[1]));
      float moments[4];  // Σ x of both sequences, Σ x² of both
      for_each([&](int, float4& x, int i) {
        moments[i] = (x.x + x.y) + (x.z + x.w);
        moments[i + 2] = (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
      });
      // After each exchange, half of the threads continue with one sum and the other half with the other.
      const float sum = exchange(moments[0], moments[1], 8), squares = exchange(moments[2], moments[3], 8);
      float own = exchange(sum, squares, 16);
#pragma unroll
      for (int lanes = 4; lanes; lanes /= 2) own += __shfl_xor_sync(~0u, own, lanes);
      const float other = __shfl_xor_sync(~0u, own, 16);
      const uint2 bits = make_uint2(__float_as_uint(own), __float_as_uint(other));
      if (lane < 16) send(&shared.moments[role.rank][s + lane / 8 * 8], lane % 8, bits, barrier);
    }
    __syncthreads();
  }

  // Of two threads, the first gets the sum of both values of x, the second that of y.
  static float exchange(float x, float y, int lanes) {
    const bool second = threadIdx.x & lanes;
    return (second ? y : x) + __shfl_xor_sync(~0u, second ? x : y, lanes);
  }
};

template <typename Result>
void add_to_stream(float* work, int phase, const Role& role, const Result& product) {
  product.for_each_result([&](int sequence, int output, float4 x) {
    atomic_add(update_at(work, phase, sequence, role.rank * SLICE + output), x);
  });
}

// Adds up the ranks' partial sums of four outputs, and applies the norm, which follows from the moments:
// (x − mean · weight_sums) / deviation + bias.

float4 sum_and_norm(const Shared& shared, int sequence, const float* partial, int stride, const float* weight_sums,
                    const float* bias) {
  float sum = 0, squares = 0;
  float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) {
    sum += shared.moments[rank][sequence].x;
    squares += shared.moments[rank][sequence].y;
    x = add(x, four_at(partial + rank * stride));
  }
  // Rounding may make the variance of nearly equal numbers negative.
  const float mean = sum / WIDTH, scale = rsqrtf(fmaxf(squares / WIDTH - mean * mean, 0.0f) + NORM_EPS);
  return add(four_at(bias), scale, add(x, -mean, four_at(weight_sums)));
}

// φ(q), φ(k) and values of the rank's sequences; φ(k) is zero for sequences that have ended, so that S and z stay.
void finish_qkv(Shared& shared, const Role& role, const HeadVectors& vectors) {
  for (int i = threadIdx.x * 4; i < RANK_SEQUENCES * QKV; i += THREADS * 4) {
    const int own = i / QKV, output = i % QKV, sequence = role.rank + 8 * own;
    const float* partial = &shared.qkv_sums[0][own][output];
    float4 x = sum_and_norm(shared, sequence, partial, RANK_SEQUENCES * QKV, vectors.weight_sums + output,
                            vectors.bias + output);
    if (output < 2 * FEATURES) x = relu(x);
    if (output >= FEATURES && output < 2 * FEATURES) x = scaled(x, shared.keep[sequence]);
    four_at(&shared.qkv[own][output]) = x;
  }
  __syncthreads();
}

// The rank's hidden units. Two neighbouring threads compute four units, one for sequence s and one for s + 8. Each
// sends both results to half of the ranks.
void finish_hidden(Shared& shared, const Role& role, const FeedVectors& vectors) {
  constexpr int ITEMS = 2 * 8 * RANK_UNITS / 4;
  const int item = threadIdx.x < ITEMS ? threadIdx.x : ITEMS - 1;
  const int half = item % 2, unit = item / 2 * 4 % RANK_UNITS, s = item / 2 * 4 / RANK_UNITS;
  if (threadIdx.x / 32 * 32 < ITEMS) {
    const float* partial = &shared.up_sums[0][half][s * RANK_UNITS + unit];
    const int stride = sizeof(shared.up_sums[0]) / sizeof(float);
    const uint2 own = to_bfloats(relu(sum_and_norm(shared, s + 8 * half, partial, stride, vectors.weight_sums + unit,
                                                   vectors.bias + unit)));
    const uint2 other = make_uint2(__shfl_xor_sync(~0u, own.x, 1), __shfl_xor_sync(~0u, own.y, 1));
    const uint4 both = half ? interleave(other, own) : interleave(own, other);
    const uint4* to = shared.hidden.at(s, role.rank * RANK_UNITS + unit);
    if (threadIdx.x < ITEMS) {
#pragma unroll
      for (int i = 0; i < RANKS / 2; i++) send(to, half * RANKS / 2 + i, both, &shared.hidden_barrier);
    }
  }
  __syncthreads();
}

// The recurrent step. S and z of a rank's sequences are loaded and stored asynchronously, by one thread.

constexpr u32 S_BYTES = FEATURES * HEAD_DIM * 4, Z_BYTES = FEATURES * 4;

// How many of a rank's sequences are in the batch; the others are padding.
int batch_sequences(const Role& role) { return (BATCH > role.rank) + (BATCH > role.rank + 8); }

// Calls use(0 or 1, S, z) for the rank's sequences in the batch, with pointers to global memory.
template <typename Use>
void for_each_state(Shared& shared, int layer, const Role& role, Use use) {
  for (int own = 0; own < batch_sequences(role); own++) {
    const int head = ((role.rank + 8 * own) * HEADS + role.cluster) * FEATURES;
    use(own, shared.states[2 * layer] + head * HEAD_DIM, shared.states[2 * layer + 1] + head);
  }
}

void load_state(Shared& shared, int layer, const Role& role) {
  if (layer >= LAYERS) return;
  expect_bytes(&shared.state_barrier, batch_sequences(role) * (S_BYTES + Z_BYTES));
  for_each_state(shared, layer, role, [&](int own, const float* S, const float* z) {
    load_async(shared.S[own], S, S_BYTES, &shared.state_barrier);
    load_async(shared.z[own], z, Z_BYTES, &shared.state_barrier);
  });
}

void store_state(Shared& shared, int layer, const Role& role) {
  for_each_state(shared, layer, role, [&](int own, float* S, float* z) {
    store_async(S, shared.S[own], S_BYTES);
    store_async(z, shared.new_z[own], Z_BYTES);
  });
  commit_stores();
}

void zero_padding_states(Shared& shared, const Role& role) {
  for (int own = batch_sequences(role); own < RANK_SEQUENCES; own++) {
    for (int i = threadIdx.x; i < FEATURES * HEAD_DIM; i += THREADS) shared.S[own][i] = 0;
    if (threadIdx.x < FEATURES) shared.z[own][threadIdx.x] = 0;
  }
}

float4 sum_over_quarters(float4 x) {
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes *= 2) {
    x.x += __shfl_xor_sync(~0u, x.x, lanes);
    x.y += __shfl_xor_sync(~0u, x.y, lanes);
    x.z += __shfl_xor_sync(~0u, x.z, lanes);
    x.w += __shfl_xor_sync(~0u, x.w, lanes);
  }
  return x;
}

// Updates S and z by a key and a value, and sends the attention output to all ranks. The numerator q (S + k vᵀ) is
// computed as q S + (q k) vᵀ, so that S can be updated while the output is being sent. A thread has four columns of one
// sequence's S, and every fourth feature: a warp's lanes are 4 quarters of the features × 2 sequences × 4 column
// groups.
void recurrent_step(Shared& shared, const Role& role) {
  if (threadIdx.x >= STEP_THREADS) return;
  const int lane = threadIdx.x % 32, own = lane / 4 % 2, quarter = lane / 8;
  const int column = threadIdx.x / 32 * 16 + lane % 4 * 4;
  const float *q = shared.qkv[own], *k = q + FEATURES;
  const float4 v = four_at(k + FEATURES + column);
  float4 S[THREAD_FEATURES], q_S = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < THREAD_FEATURES; i++) {
    const int feature = i * 4 + quarter;
    S[i] = four_at(&shared.S[own][feature * HEAD_DIM + column]);
    q_S = add(q_S, q[feature], S[i]);
  }
  q_S = sum_over_quarters(q_S);
  float q_k = 0, q_z = 0;
#pragma unroll
  for (int i = 0; i < THREAD_FEATURES; i++) {
    const int feature = i * 4 + quarter;
    q_k += q[feature] * k[feature];
    q_z += q[feature] * shared.z[own][feature];
  }
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes *= 2) {
    q_k += __shfl_xor_sync(~0u, q_k, lanes);
    q_z += __shfl_xor_sync(~0u, q_z, lanes);
  }
  const float denominator = q_k + q_z;
  const float scale = 1 / (NORMALIZER_CLAMPS ? fmaxf(denominator, NORMALIZER_VALUE) : denominator + NORMALIZER_VALUE);
  const uint2 result = to_bfloats(scaled(add(q_S, q_k, v), scale));
  const uint2 other = make_uint2(__shfl_xor_sync(~0u, result.x, 4), __shfl_xor_sync(~0u, result.y, 4));
  send(shared.attended.at(role.rank, column), lane / 4, own ? interleave(other, result) : interleave(result, other),
       &shared.attended_barrier);
#pragma unroll
  for (int i = 0; i < THREAD_FEATURES; i++) {
    const int feature = i * 4 + quarter;
    four_at(&shared.S[own][feature * HEAD_DIM + column]) = add(S[i], k[feature], v);
  }
  if (lane < FEATURES) {
#pragma unroll
    for (int i = 0; i < RANK_SEQUENCES; i++) {  // all warps write the same values
      shared.new_z[i][lane] = shared.z[i][lane] + shared.qkv[i][FEATURES + lane];
    }
  }
  fence_before_store();
}

KERNEL(RANKS, THREADS) decode_step(PARAMETERS) {
  SHARED(Shared, shared);
  const Role role = {head_chunks, feed_chunks, head_vectors, feed_vectors};

  if (threadIdx.x == 0) {
    float* const states[] = {STATE_POINTERS};
#pragma unroll
    for (int i = 0; i < 2 * LAYERS; i++) shared.states[i] = states[i];
    for (u64* barrier = shared.chunk_barrier; barrier <= &shared.hidden_barrier; barrier++) init_barrier(barrier);
    fence_barrier_init();
    load_vectors(shared, role, 0);
    expect_bytes(&shared.qkv_barrier, QKV_BYTES);
    expect_bytes(&shared.attended_barrier, ATTENDED_BYTES);
    expect_bytes(&shared.up_barrier, UP_BYTES);
    expect_bytes(&shared.hidden_barrier, HIDDEN_BYTES);
  }
  if (threadIdx.x < SEQUENCES) shared.keep[threadIdx.x] = keep[threadIdx.x];
  zero_padding_states(shared, role);
  __syncthreads();
  sync_cluster();
  refill_slots(shared, role, -SLOTS, SLOTS);  // the first SLOTS chunks
  const bool moves_state = role.has_head() && threadIdx.x == LOADING_THREAD;
  if (moves_state) load_state(shared, 0, role);

  Stream stream(work, role);
  Product<QKV, SLICE> qkv;
  qkv.preload(shared, 0, role.has_head());
  for (int layer = 0; layer < LAYERS; layer++) {
    // Numbers of the first chunk of each matrix.
    const int qkv_first = layer * role.layer_chunks(), out_first = qkv_first + QKV_CHUNKS;
    const int up_first = qkv_first + role.has_head() * HEAD_CHUNKS, down_first = up_first + UP_CHUNKS;
    const HeadVectors& head = shared.head_vectors[layer % 2];
    const FeedVectors& feed = shared.feed_vectors[layer % 2];
    wait_for_loads(&shared.vector_barrier[layer % 2], layer / 2 % 2);

    // Attention.
    if (role.has_head()) stream.publish(shared, role, &shared.qkv_barrier);
    const int late_feed_refills = FEED_CHUNKS - EARLY_FEED_REFILLS;  // of the previous layer
    if (layer) refill_slots(shared, role, qkv_first - late_feed_refills, late_feed_refills);
    if (role.has_head()) {
      qkv.multiply(shared, shared.stream, qkv_first);
      qkv.for_each_result([&](int sequence, int output, float4 x) {
        send(&shared.qkv_sums[role.rank][sequence / 8][output], sequence % 8, x, &shared.qkv_barrier);
      });
      receive(&shared.qkv_barrier, layer, QKV_BYTES);
      finish_qkv(shared, role, head);
      wait_for_loads(&shared.state_barrier, layer % 2);
      recurrent_step(shared, role);
      refill_slots(shared, role, qkv_first, QKV_REFILLS_BEFORE_BARRIER);
      Product<SLICE, HEAD_DIM> out;
      out.preload(shared, out_first);
      receive(&shared.attended_barrier, layer, ATTENDED_BYTES);
      out.multiply(shared, shared.attended, out_first);
      add_to_stream(work, 2 * layer, role, out);
    }
    Product<UNITS, SLICE> up;
    stream.synchronise(work, 2 * layer, role, feed.out_bias, [&] { up.preload(shared, up_first); });

    // Feed-forward.
    stream.publish(shared, role, &shared.up_barrier);
    refill_slots(shared, role, qkv_first + role.has_head() * QKV_REFILLS_BEFORE_BARRIER,
                 role.has_head() * (HEAD_CHUNKS - QKV_REFILLS_BEFORE_BARRIER) + EARLY_FEED_REFILLS);
    up.multiply(shared, shared.stream, up_first);
    up.for_each_result([&](int sequence, int output, float4 x) {
      send(&shared.up_sums[role.rank][sequence / 8][sequence % 8 * RANK_UNITS + output % RANK_UNITS],
           output / RANK_UNITS, x, &shared.up_barrier);
    });
    if (threadIdx.x == LOADING_THREAD) load_vectors(shared, role, layer + 1);
    if (moves_state) store_state(shared, layer, role);
    receive(&shared.up_barrier, layer, UP_BYTES);
    finish_hidden(shared, role, feed);
    if (moves_state) {
      wait_until_read();
      load_state(shared, layer + 1, role);
    }
    Product<SLICE, UNITS> down;
    down.preload(shared, down_first);
    receive(&shared.hidden_barrier, layer, HIDDEN_BYTES);
    down.multiply(shared, shared.hidden, down_first);
    add_to_stream(work, 2 * layer + 1, role, down);
    stream.synchronise(work, 2 * layer + 1, role, feed.down_bias, [&] {
      qkv.preload(shared, qkv_first + role.layer_chunks(), role.has_head() && layer + 1 < LAYERS);
    });
  }
  if (role.cluster == 0) {
    stream.for_each([&](int sequence, float4& x, int) {
      four_at(work + sequence * WIDTH + stream.slice + stream.channel) = x;
    });
  }
  if (moves_state) wait_until_stored();
}
