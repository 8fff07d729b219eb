// All layers of a decoding step of T2R in one kernel, by the functions of hopper.cuh.
//
// Blocks of threads, one on each multiprocessor, are in clusters of 8 ranks. Within a cluster, blocks write into each
// other's memory; all of them meet only by way of the GPU's, which takes several times as long. So each cluster has a
// part of each layer that begins and ends with the residual stream: a head, if there is one for it, and some of the
// feed-forward's units.
//
//   norm, queries, keys, values   a rank has a slice of the stream's columns; sums of products meet at a text's rank
//   recurrent step                a rank has two texts; what they attend to goes to all ranks
//   output projection             a rank has a slice of the outputs; what clusters find adds up in the stream
//   norm, feed-forward up         as the first; sums meet at a unit's rank, whose result goes to all ranks
//   feed-forward down             as the third
//
// A rank reads and adds to the same slice of the stream, so only blocks of one rank meet, twice a layer. What they wait
// for then would come after all that they asked for before. So matrices are on their way between meetings, and threads
// have read them when a meeting ends.
//
// Given by one_kernel.py: LAYERS, WIDTH, HEADS, FEATURES, HEAD, FEEDERS, UNITS, BATCH, EPSILON, CLAMP, LEAST, and
// POINTERS, STATES: parameters, and a list of some, S and z of each layer.

constexpr int TEXTS = 16, RANKS = 8, WARPS = 9;
constexpr int THREADS = 32 * (WARPS + 1);    // the last warp asks for what comes from the GPU's memory
constexpr int SLICE = WIDTH / RANKS;         // of the stream's columns
constexpr int ROWS = 2 * FEATURES + HEAD;    // of a head: queries, keys, values
constexpr int OWN = UNITS / RANKS;           // units that are a rank's, of those of its cluster
constexpr int EACH = TEXTS / RANKS;          // texts that are a rank's
constexpr int KEYS = FEATURES / 4;           // rows of S of which a thread changes four columns
constexpr int STEPPERS = 128 * EACH;         // threads that do
constexpr int COUNTS = STEPPERS;             // the thread that counts who has come: one that does not
constexpr int ASKS = THREADS - 1;            // the one that asks for all but chunks

static_assert(SLICE == 128 && HEAD == 128 && ROWS % 32 == 0 && UNITS % 32 == 0, "not for these sizes");
static_assert(FEATURES % 8 == 0 && FEATURES <= 32 && HEADS <= FEEDERS && FEEDERS <= TEXTS, "not for these sizes");
static_assert(RANKS == 8 && EACH == 2 && STEPPERS < 32 * WARPS && OWN == 4 * WARPS, "not for these sizes");

// Numbers of 16 texts, as tensor cores take them: for texts t and t + 8, four columns are in 16 bytes, the first two of
// both before the last two. Before the next texts' there is a gap, lest several threads want the same bank of memory.

constexpr int stride_of(int columns) { return columns / 4 + 4; }

template <int COLUMNS>
struct Texts {
  uint4 all[8 * stride_of(COLUMNS)];

  uint4* at(int t, int column) { return all + t * stride_of(COLUMNS) + column / 4; }
  const uint4* at(int t, int column) const { return all + t * stride_of(COLUMNS) + column / 4; }
};

uint4 both(uint2 text, uint2 other) { return make_uint4(text.x, other.x, text.y, other.y); }

// A block's matrices come in chunks, one after the other, each to the place of the one SLOTS before: 32 rows of 128
// columns, or 128 rows of 32. For 8 rows and 32 columns there are 32 × 16 bytes, one for each thread.

constexpr int CHUNK = 16;  // of these
constexpr int SLOTS = 19;

constexpr int chunks_for(int rows, int columns) { return rows * columns / (CHUNK * 8 * 32); }

constexpr int FOR_PROJECTIONS = chunks_for(ROWS, SLICE), FOR_OUT = chunks_for(SLICE, HEAD);
constexpr int FOR_UP = chunks_for(UNITS, SLICE), FOR_DOWN = chunks_for(SLICE, UNITS);
constexpr int FOR_HEAD = FOR_PROJECTIONS + FOR_OUT, FOR_FEED = FOR_UP + FOR_DOWN;

// What takes the place of chunks is asked for after each meeting, and a little before the first of a layer.
constexpr int SOON = 4;                                    // of the projections': these, before it
constexpr int EARLY = FOR_PROJECTIONS + FOR_FEED - SLOTS;  // of the feed-forward's: for what the next layer begins with

// What belongs to rows: their sums, which a norm's mean is multiplied by, and biases.

struct HeadRows {
  float sums[ROWS], bias[ROWS];
};

struct FeedRows {
  float sums[OWN], bias[OWN], down_bias[SLICE], out_bias[SLICE];
};

struct Shared {
  uint4 chunks[SLOTS][CHUNK * 32];
  Texts<SLICE> stream;
  union {
    Texts<HEAD> attended;
    Texts<UNITS> hidden;
  };
  union {  // sums of products, from each rank
    float projected[RANKS][EACH][ROWS], raised[RANKS][2][8 * OWN + 16];  // with a gap for the banks' sake
  };
  HeadRows head_rows[2];  // of this layer, and of the next
  FeedRows feed_rows[2];
  float2 moments[RANKS][TEXTS];  // of a text's slice: Σ x and Σ x²
  float keep[TEXTS], qkv[EACH][ROWS + 4];  // with gaps for the banks' sake
  float S[EACH][FEATURES * HEAD + 16], z[EACH][FEATURES + 4], new_z[EACH][FEATURES];
  float* states[2 * LAYERS];
  u64 chunk_arrived[SLOTS], rows_arrived[2], state_arrived;
  u64 projected_arrived, attended_arrived, raised_arrived, hidden_arrived;
};

static_assert(sizeof(Shared) <= MEMORY, "not for these sizes");

constexpr u32 MOMENTS = sizeof(Shared::moments);  // bytes that a block receives
constexpr u32 PROJECTED = sizeof(Shared::projected) + MOMENTS, RAISED = RANKS * TEXTS * OWN * 4 + MOMENTS;
constexpr u32 ATTENDED = TEXTS * HEAD * 2, HIDDEN = TEXTS * UNITS * 2;

void receive(u64* arrived, int layer, u32 bytes) {
  wait_for_sent(arrived, layer % 2);
  if (threadIdx.x == 0) expect(arrived, bytes);  // the next time
}

// Which part of the work is a block's, and where its matrices are.

struct Part {
  const uint4 *head_chunks, *feed_chunks;
  const HeadRows* head_rows;
  const FeedRows* feed_rows;
  int cluster = blockIdx.x / RANKS, rank = blockIdx.x % RANKS;

  bool attends() const { return cluster < HEADS; }
  int for_layer() const { return attends() * FOR_HEAD + FOR_FEED; }

  const uint4* chunk(int number) const {
    const int layer = attends() ? number / (FOR_HEAD + FOR_FEED) : number / FOR_FEED;
    const int place = number - layer * for_layer() - attends() * FOR_HEAD;  // among those for the feed-forward
    const u64 before = (u64)blockIdx.x * LAYERS + layer;
    return place < 0 ? head_chunks + (before * FOR_HEAD + FOR_HEAD + place) * CHUNK * 32
                     : feed_chunks + (before * FOR_FEED + place) * CHUNK * 32;
  }
};

void ask_for_chunk(Shared& shared, const Part& part, int number) {
  if (number >= LAYERS * part.for_layer()) return;
  u64* arrived = &shared.chunk_arrived[number % SLOTS];
  expect(arrived, sizeof(shared.chunks[0]));
  fetch(shared.chunks[number % SLOTS], part.chunk(number), sizeof(shared.chunks[0]), arrived);
}

void wait_for_chunks(Shared& shared, int first, int count) {  // each thread of a warp for one
  const int number = first + threadIdx.x % 32;
  if (number < first + count) wait_for_fetched(&shared.chunk_arrived[number % SLOTS], number / SLOTS % 2);
  __syncwarp();
}

// Of several chunks that nobody reads any more, each thread of the last warp asks for what takes the place of one.
void replace_chunks(Shared& shared, const Part& part, int first, int count) {
  const int number = first + (int)threadIdx.x - 32 * WARPS;
  if (threadIdx.x >= 32 * WARPS && number < first + count) ask_for_chunk(shared, part, number + SLOTS);
}

void ask_for_rows(Shared& shared, const Part& part, int layer) {
  if (layer >= LAYERS) return;
  u64* arrived = &shared.rows_arrived[layer % 2];
  const int place = blockIdx.x * LAYERS + layer;
  expect(arrived, part.attends() * sizeof(HeadRows) + sizeof(FeedRows));
  if (part.attends()) fetch(&shared.head_rows[layer % 2], part.head_rows + place, sizeof(HeadRows), arrived);
  fetch(&shared.feed_rows[layer % 2], part.feed_rows + place, sizeof(FeedRows), arrived);
}

// Products of 16 texts with rows, 32 of which are a warp's. Threads read most of the rows before texts are there.

template <int ROWS, int COLUMNS>
struct Product {
  static constexpr int GROUPS = ROWS / 32, STEPS = COLUMNS / 32, READY = 4, AHEAD = 2;
  static constexpr bool BY_ROWS = STEPS == 4;  // a chunk is 32 rows of 128 columns
  static_assert(ROWS % 32 == 0 && GROUPS <= WARPS && STEPS <= SLOTS && (BY_ROWS || GROUPS == 4), "not whole chunks");
  uint4 rows[STEPS][4];  // of 32 columns, 8 rows
  float sums[4][4];

  static int group() { return threadIdx.x / 32; }
  static bool has() { return group() < GROUPS; }

  // Rows are in chunks from `first` on.
  void read(Shared& shared, int first, int step) {
    const int number = BY_ROWS ? first + group() : first + step, place = BY_ROWS ? step : group();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      rows[step][i] = shared.chunks[number % SLOTS][(place * 4 + i) * 32 + threadIdx.x % 32];
    }
  }

  void prepare(Shared& shared, int first, bool needed = true) {
#pragma unroll
    for (int i = 0; i < 4 * READY; i++) rows[i / 4][i % 4] = {};  // or the compiler would keep what they were
    if (!has() || !needed) return;
    wait_for_chunks(shared, BY_ROWS ? first + group() : first, BY_ROWS ? 1 : STEPS);
#pragma unroll
    for (int step = 0; step < READY; step++) read(shared, first, step);
  }

  void multiply_by(Shared& shared, const Texts<COLUMNS>& texts, int first) {
#pragma unroll
    for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0;
    if (!has()) return;
    const int lane = threadIdx.x % 32;
    const uint4* four = texts.at(lane / 4, lane % 4 * 4);
    uint4 low[STEPS], high[STEPS];
    const auto read_texts = [&](int step) { low[step] = four[step * 8], high[step] = four[step * 8 + 4]; };
#pragma unroll
    for (int step = 0; step < AHEAD; step++) read_texts(step);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if (step + AHEAD < STEPS) read_texts(step + AHEAD);
      if (step >= READY - AHEAD && step + AHEAD < STEPS) read(shared, first, step + AHEAD);
#pragma unroll
      for (int i = 0; i < 4; i++) multiply(sums[i], low[step], rows[step][i].x, rows[step][i].y);
#pragma unroll
      for (int i = 0; i < 4; i++) multiply(sums[i], high[step], rows[step][i].z, rows[step][i].w);
    }
  }

  template <typename Take>
  void give(Take take) const {  // text, row, four of them
    if (!has()) return;
#pragma unroll
    for (int i = 0; i < 4; i += 2)
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        const int text = threadIdx.x % 32 / 4 + 4 * half, row = group() * 32 + i * 8 + threadIdx.x % 4 * 4;
        take(text, row, make_float4(sums[i][half], sums[i][half + 1], sums[i + 1][half], sums[i + 1][half + 1]));
      }
  }
};

uint2 bfloats(float4 x) { return make_uint2(bfloats(x.x, x.y), bfloats(x.z, x.w)); }

float4 add(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }

// x + factor · y
float4 add(float4 x, float factor, float4 y) {
  return make_float4(x.x + factor * y.x, x.y + factor * y.y, x.z + factor * y.z, x.w + factor * y.w);
}

float4 scaled(float4 x, float scale) { return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale); }

float4 relu(float4 x) { return make_float4(fmaxf(x.x, 0.f), fmaxf(x.y, 0.f), fmaxf(x.z, 0.f), fmaxf(x.w, 0.f)); }

float4& four_of(float* x) { return *(float4*)x; }
const float4& four_of(const float* x) { return *(const float4*)x; }

// The residual stream. All blocks of a rank have a slice of it, and the same numbers there: a warp has texts t and
// t + 8, a thread four columns of each. What changes in a phase, which is half a layer, they add up in one of three
// places: they add to the next while others still read the one before, and meanwhile set the third to zero.

float* change_at(float* work, int phase, int text, int column) {
  return work + ((1 + phase % 3) * TEXTS + text) * WIDTH + column;
}

struct Stream {
  float4 x[2];
  const int t = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane * 4, slice;

  Stream(const float* work, const Part& part) : slice(part.rank * SLICE) {
    each([&](int text, float4& x, int) { x = four_of(work + text * WIDTH + slice + column); });
  }

  template <typename Use>
  void each(Use use) {  // text, its four columns, and which of both it is
    if (t >= 8) return;
#pragma unroll
    for (int i = 0; i < 2; i++) use(t + 8 * i, x[i], i);
  }

  // Waits until all blocks of this rank have come, and takes in what they have added. The thread that counts has
  // nothing on its way from or to memory: it would have to wait for that too.
  template <typename Work>
  void meet(float* work, int phase, const Part& part, const float* bias, Work meanwhile) {
    u32* counter = (u32*)(work + 4 * TEXTS * WIDTH) + part.rank * 32;
    __syncthreads();
    if (threadIdx.x == COUNTS) count(counter);
    meanwhile();
    if (threadIdx.x == COUNTS) wait_for_count(counter, (phase + 1) * FEEDERS);
    __syncthreads();
    float4 change[2];
    each([&](int text, float4&, int i) { change[i] = read(change_at(work, phase, text, slice + column)); });
    each([&](int text, float4& x, int i) {
      x = add(add(x, change[i]), four_of(bias + column));
      if (text % FEEDERS == part.cluster)
        four_of(change_at(work, phase + 2, text, slice + column)) = make_float4(0, 0, 0, 0);
    });
  }

  // To the block's threads as factors, and to all ranks as moments, for the norm: Σ x and Σ x².
  void give(Shared& shared, const Part& part, u64* arrived) {
    if (t < 8) {
      *shared.stream.at(t, column) = both(bfloats(x[0]), bfloats(x[1]));
      float moments[4];
      each([&](int, float4& x, int i) {
        moments[i] = (x.x + x.y) + (x.z + x.w);
        moments[i + 2] = (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
      });
      // Half of the threads go on with some of the sums, the other half with the others.
      const float sum = exchange(moments[0], moments[1], 8), squares = exchange(moments[2], moments[3], 8);
      float mine = exchange(sum, squares, 16);
#pragma unroll
      for (int lanes = 4; lanes; lanes /= 2) mine += __shfl_xor_sync(~0u, mine, lanes);
      const float other = __shfl_xor_sync(~0u, mine, 16);
      const uint2 bits = make_uint2(__float_as_uint(mine), __float_as_uint(other));
      if (lane < 16) send(&shared.moments[part.rank][t + lane / 8 * 8], lane % 8, bits, arrived);
    }
    __syncthreads();
  }

  static float exchange(float x, float y, int lanes) {  // x of two threads to the first of them, y to the second
    const bool second = threadIdx.x & lanes;
    return (second ? y : x) + __shfl_xor_sync(~0u, second ? x : y, lanes);
  }
};

template <typename Found>
void add_to_stream(float* work, int phase, const Part& part, const Found& found) {
  found.give([&](int text, int row, float4 x) { add_to(change_at(work, phase, text, part.rank * SLICE + row), x); });
}

// What ranks have sent, added up, and the norm that was left for after the product.

float4 normed(const Shared& shared, int text, const float* from, int stride, const float* sums, const float* bias) {
  float sum = 0, squares = 0;
  float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) {
    sum += shared.moments[rank][text].x;
    squares += shared.moments[rank][text].y;
    x = add(x, four_of(from + rank * stride));
  }
  const float mean = sum / WIDTH, scale = rsqrtf(squares / WIDTH - mean * mean + EPSILON);
  return add(four_of(bias), scale, add(x, -mean, four_of(sums)));
}

void finish_projections(Shared& shared, const Part& part, const HeadRows& rows) {
  for (int i = threadIdx.x * 4; i < EACH * ROWS; i += THREADS * 4) {
    const int own = i / ROWS, row = i % ROWS, text = part.rank + 8 * own;
    const float* from = &shared.projected[0][own][row];
    float4 x = normed(shared, text, from, EACH * ROWS, rows.sums + row, rows.bias + row);
    if (row < 2 * FEATURES) x = relu(x);
    if (row >= FEATURES && row < 2 * FEATURES) x = scaled(x, shared.keep[text]);
    four_of(&shared.qkv[own][row]) = x;
  }
  __syncthreads();
}

// Two threads side by side have four of the rank's units, for texts t and t + 8. Each gives both to half of the ranks.
void finish_hidden(Shared& shared, const Part& part, const FeedRows& rows) {
  constexpr int ITEMS = 2 * 8 * OWN / 4;
  const int item = threadIdx.x < ITEMS ? threadIdx.x : ITEMS - 1;
  const int half = item % 2, unit = item / 2 * 4 % OWN, t = item / 2 * 4 / OWN;
  if (threadIdx.x / 32 * 32 < ITEMS) {
    const float* from = &shared.raised[0][half][t * OWN + unit];
    const int next = sizeof(shared.raised[0]) / sizeof(float);
    const uint2 mine = bfloats(relu(normed(shared, t + 8 * half, from, next, rows.sums + unit, rows.bias + unit)));
    const uint2 other = make_uint2(__shfl_xor_sync(~0u, mine.x, 1), __shfl_xor_sync(~0u, mine.y, 1));
    const uint4 found = half ? both(other, mine) : both(mine, other);
    const uint4* place = shared.hidden.at(t, part.rank * OWN + unit);
    if (threadIdx.x < ITEMS) {
#pragma unroll
      for (int i = 0; i < RANKS / 2; i++) send(place, half * RANKS / 2 + i, found, &shared.hidden_arrived);
    }
  }
  __syncthreads();
}

// The recurrent step. S and z of a rank's texts come and go by themselves, one thread asks for them.

constexpr u32 S_BYTES = FEATURES * HEAD * 4, Z_BYTES = FEATURES * 4;

int texts_there(const Part& part) { return (BATCH > part.rank) + (BATCH > part.rank + 8); }  // of a rank's

template <typename Use>
void each_state(Shared& shared, int layer, const Part& part, Use use) {  // which of the rank's texts; where S and z are
  for (int own = 0; own < texts_there(part); own++) {
    const int head = ((part.rank + 8 * own) * HEADS + part.cluster) * FEATURES;
    use(own, shared.states[2 * layer] + head * HEAD, shared.states[2 * layer + 1] + head);
  }
}

void ask_for_state(Shared& shared, int layer, const Part& part) {
  if (layer >= LAYERS) return;
  expect(&shared.state_arrived, texts_there(part) * (S_BYTES + Z_BYTES));
  each_state(shared, layer, part, [&](int own, const float* S, const float* z) {
    fetch(shared.S[own], S, S_BYTES, &shared.state_arrived);
    fetch(shared.z[own], z, Z_BYTES, &shared.state_arrived);
  });
}

void store_state(Shared& shared, int layer, const Part& part) {
  each_state(shared, layer, part, [&](int own, float* S, float* z) {
    store(S, shared.S[own], S_BYTES);
    store(z, shared.new_z[own], Z_BYTES);
  });
  all_is_asked_for();
}

void begin_state(Shared& shared, const Part& part) {  // of texts that are not there
  for (int own = texts_there(part); own < EACH; own++) {
    for (int i = threadIdx.x; i < FEATURES * HEAD; i += THREADS) shared.S[own][i] = 0;
    if (threadIdx.x < FEATURES) shared.z[own][threadIdx.x] = 0;
  }
}

float4 sum_of_quarters(float4 x) {
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes *= 2) {
    x.x += __shfl_xor_sync(~0u, x.x, lanes);
    x.y += __shfl_xor_sync(~0u, x.y, lanes);
    x.z += __shfl_xor_sync(~0u, x.z, lanes);
    x.w += __shfl_xor_sync(~0u, x.w, lanes);
  }
  return x;
}

// Takes in a key and a value, and gives all ranks what a query finds: q (S + k vᵀ), which is q S + (q k) vᵀ, so that S
// can change while that is on its way. A thread has four columns of one text, and every fourth key; its neighbours have
// the other text's, and other keys.
void take_step(Shared& shared, const Part& part) {
  if (threadIdx.x >= STEPPERS) return;
  const int lane = threadIdx.x % 32, own = lane / 4 % 2, quarter = lane / 8;
  const int column = threadIdx.x / 32 * 16 + lane % 4 * 4;
  const float *q = shared.qkv[own], *k = q + FEATURES;
  const float4 v = four_of(k + FEATURES + column);
  float4 S[KEYS], sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int key = i * 4 + quarter;
    S[i] = four_of(&shared.S[own][key * HEAD + column]);
    sum = add(sum, q[key], S[i]);
  }
  sum = sum_of_quarters(sum);
  float with_key = 0, with_z = 0;
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int key = i * 4 + quarter;
    with_key += q[key] * k[key];
    with_z += q[key] * shared.z[own][key];
  }
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes *= 2) {
    with_key += __shfl_xor_sync(~0u, with_key, lanes);
    with_z += __shfl_xor_sync(~0u, with_z, lanes);
  }
  const float below = with_key + with_z, scale = 1 / (CLAMP ? fmaxf(below, LEAST) : below + LEAST);
  const uint2 mine = bfloats(scaled(add(sum, with_key, v), scale));
  const uint2 other = make_uint2(__shfl_xor_sync(~0u, mine.x, 4), __shfl_xor_sync(~0u, mine.y, 4));
  send(shared.attended.at(part.rank, column), lane / 4, own ? both(other, mine) : both(mine, other),
       &shared.attended_arrived);
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int key = i * 4 + quarter;
    four_of(&shared.S[own][key * HEAD + column]) = add(S[i], k[key], v);
  }
  if (lane < FEATURES) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {  // each warp, the same
      shared.new_z[i][lane] = shared.z[i][lane] + shared.qkv[i][FEATURES + lane];
    }
  }
  is_written();
}

KERNEL(RANKS, THREADS) decode_step(POINTERS) {
  SHARED(Shared, shared);
  const Part part = {head_chunks, feed_chunks, head_rows, feed_rows};

  if (threadIdx.x == 0) {
    float* const states[] = {STATES};
#pragma unroll
    for (int i = 0; i < 2 * LAYERS; i++) shared.states[i] = states[i];
    for (u64* one = shared.chunk_arrived; one <= &shared.hidden_arrived; one++) begin(one);
    all_have_begun();
    ask_for_rows(shared, part, 0);
    expect(&shared.projected_arrived, PROJECTED);
    expect(&shared.attended_arrived, ATTENDED);
    expect(&shared.raised_arrived, RAISED);
    expect(&shared.hidden_arrived, HIDDEN);
  }
  if (threadIdx.x < TEXTS) shared.keep[threadIdx.x] = keep[threadIdx.x];
  begin_state(shared, part);
  __syncthreads();
  meet_cluster();
  replace_chunks(shared, part, -SLOTS, SLOTS);
  const bool has_state = part.attends() && threadIdx.x == ASKS;
  if (has_state) ask_for_state(shared, 0, part);

  Stream stream(work, part);
  Product<ROWS, SLICE> projections;
  projections.prepare(shared, 0, part.attends());
  for (int layer = 0; layer < LAYERS; layer++) {
    const int for_projections = layer * part.for_layer(), for_out = for_projections + FOR_PROJECTIONS;
    const int for_up = for_projections + part.attends() * FOR_HEAD, for_down = for_up + FOR_UP;
    const HeadRows& of_head = shared.head_rows[layer % 2];
    const FeedRows& of_feed = shared.feed_rows[layer % 2];
    wait_for_fetched(&shared.rows_arrived[layer % 2], layer / 2 % 2);

    if (part.attends()) stream.give(shared, part, &shared.projected_arrived);
    if (layer) replace_chunks(shared, part, for_projections - FOR_FEED + EARLY, FOR_FEED - EARLY);
    if (part.attends()) {
      projections.multiply_by(shared, shared.stream, for_projections);
      projections.give([&](int text, int row, float4 x) {
        send(&shared.projected[part.rank][text / 8][row], text % 8, x, &shared.projected_arrived);
      });
      receive(&shared.projected_arrived, layer, PROJECTED);
      finish_projections(shared, part, of_head);
      wait_for_fetched(&shared.state_arrived, layer % 2);
      take_step(shared, part);
      replace_chunks(shared, part, for_projections, SOON);
      Product<SLICE, HEAD> out;
      out.prepare(shared, for_out);
      receive(&shared.attended_arrived, layer, ATTENDED);
      out.multiply_by(shared, shared.attended, for_out);
      add_to_stream(work, 2 * layer, part, out);
    }
    Product<UNITS, SLICE> up;
    stream.meet(work, 2 * layer, part, of_feed.out_bias, [&] { up.prepare(shared, for_up); });

    stream.give(shared, part, &shared.raised_arrived);
    replace_chunks(shared, part, for_projections + part.attends() * SOON, part.attends() * (FOR_HEAD - SOON) + EARLY);
    up.multiply_by(shared, shared.stream, for_up);
    up.give([&](int text, int row, float4 x) {
      send(&shared.raised[part.rank][text / 8][text % 8 * OWN + row % OWN], row / OWN, x, &shared.raised_arrived);
    });
    if (threadIdx.x == ASKS) ask_for_rows(shared, part, layer + 1);
    if (has_state) store_state(shared, layer, part);
    receive(&shared.raised_arrived, layer, RAISED);
    finish_hidden(shared, part, of_feed);
    if (has_state) {
      wait_until_read();
      ask_for_state(shared, layer + 1, part);
    }
    Product<SLICE, UNITS> down;
    down.prepare(shared, for_down);
    receive(&shared.hidden_arrived, layer, HIDDEN);
    down.multiply_by(shared, shared.hidden, for_down);
    add_to_stream(work, 2 * layer + 1, part, down);
    stream.meet(work, 2 * layer + 1, part, of_feed.down_bias, [&] {
      projections.prepare(shared, for_projections + part.for_layer(), part.attends() && layer + 1 < LAYERS);
    });
  }
  if (part.cluster == 0) {
    stream.each([&](int text, float4& x, int) { four_of(work + text * WIDTH + stream.slice + stream.column) = x; });
  }
  if (has_state) wait_until_stored();
}
