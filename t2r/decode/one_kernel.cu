// All layers of a decoding step of T2R in one kernel, by the functions of hopper.cuh.
//
// Blocks of threads, one on each multiprocessor, are in clusters of 8 ranks. Within a cluster, blocks write into each
// other's memory; all of them meet only by way of the GPU's, which takes several times as long. So each cluster has a
// part of each layer that begins and ends with the residual stream: a head, if there is one for it, and some of the
// feed-forward's units.
//
//   norm, queries, keys, values   a rank has a slice of the stream's columns; sums of products meet at a text's rank
//   recurrent step                a rank has two texts; what they attend to goes to all ranks
//   output projection             a rank has a slice of the outputs; clusters add up in the stream
//   norm, feed-forward up         as the first; sums meet at a unit's rank, whose result goes to all ranks
//   feed-forward down             as the third
//
// A rank reads and adds to the same slice of the stream, so only blocks of one rank wait for each other, twice a layer.
// Meanwhile, the matrices that they will multiply by are on their way.
//
// Given by one_kernel.py: LAYERS, WIDTH, HEADS, FEATURES, HEAD, FEEDERS, UNITS, BATCH, EPSILON, CLAMP, LEAST, and
// POINTERS, STATES: parameters, and a list of some, S and z of each layer.

constexpr int TEXTS = 16, RANKS = 8, WARPS = 9, THREADS = 32 * WARPS;
constexpr int SLICE = WIDTH / RANKS;         // of the stream's columns
constexpr int ROWS = 2 * FEATURES + HEAD;    // of a head: queries, keys, values
constexpr int OWN = UNITS / RANKS;           // units that are a rank's, of those of its cluster
constexpr int EACH = TEXTS / RANKS;          // texts that are a rank's
constexpr int KEYS = FEATURES / 8;           // rows of S that are a thread's
constexpr int PARTS = HEAD / 64;             // four columns of S in each of these are, likewise
constexpr int STEPPERS = 128 * EACH;         // threads that have a part of S
constexpr int OWNED = (TEXTS + HEADS - 1) / HEADS;  // texts whose residual is a cluster's, at most

static_assert(SLICE % 64 == 0 && ROWS % 16 == 0 && HEAD % 64 == 0 && UNITS % 32 == 0, "not for these sizes");
static_assert(FEATURES % 8 == 0 && FEATURES <= 32 && EACH == 2 && STEPPERS < THREADS, "not for these sizes");
static_assert(HEADS <= FEEDERS, "each cluster has some of the feed-forward");

// Numbers of 16 texts, as tensor cores take them: four columns of texts t and t + 8 in 16 bytes, then the next text's.
// Between columns there is a gap, lest several threads want the same bank of memory.

constexpr int FOUR = 10;  // columns, of 8 × 16 bytes and the gap

constexpr int texts_of(int columns) { return columns / 4 * FOUR; }

uint2* four_columns(uint4* texts, int text, int column) {
  return (uint2*)(texts + column / 4 * FOUR + text % 8) + text / 8;
}

// A block's matrices come in chunks, one after the other, each to the place of the one SLOTS before. For 8 rows and 32
// columns there are 32 × 16 bytes, one for each thread.

constexpr int CHUNK = 16;  // of these
constexpr int SLOTS = 22;

constexpr int chunks_for(int rows, int columns) { return rows / 8 * (columns / 32) / CHUNK; }

constexpr int FOR_PROJECTIONS = chunks_for(ROWS, SLICE), FOR_OUT = chunks_for(SLICE, HEAD);
constexpr int FOR_UP = chunks_for(UNITS, SLICE), FOR_DOWN = chunks_for(SLICE, UNITS);
constexpr int FOR_HEAD = FOR_PROJECTIONS + FOR_OUT, FOR_FEED = FOR_UP + FOR_DOWN;

static_assert(ROWS * SLICE % 4096 == 0 && SLICE * HEAD % 4096 == 0 && UNITS * SLICE % 4096 == 0, "not whole chunks");

// What belongs to rows: their sums, which a norm's mean is multiplied by, and biases.

struct HeadRows {
  float sums[ROWS], bias[ROWS], out_bias[SLICE];
};

struct FeedRows {
  float sums[OWN], bias[OWN], down_bias[SLICE];
};

struct Shared {
  uint4 chunks[SLOTS][CHUNK * 32];
  uint4 stream[texts_of(SLICE)], own_hidden[texts_of(OWN)];
  union {
    uint4 attended[texts_of(HEAD)], hidden[texts_of(UNITS)];
  };
  union {  // sums of products, from each rank
    float projected[RANKS][EACH][ROWS], raised[RANKS][TEXTS][OWN];
  };
  HeadRows head_rows[2];  // of this layer, and of the next
  FeedRows feed_rows[2];
  float2 moments[RANKS][TEXTS];  // of a text's slice: Σ x and Σ x²
  float keep[TEXTS], qkv[EACH][ROWS], residual[OWNED][SLICE];
  float* states[2 * LAYERS];
  u64 chunk_arrived[SLOTS], rows_arrived[2], projected_arrived, attended_arrived, raised_arrived, hidden_arrived;
};

static_assert(sizeof(Shared) <= MEMORY, "not for these sizes");

constexpr u32 MOMENTS = sizeof(Shared::moments);  // bytes that a block receives
constexpr u32 PROJECTED = sizeof(Shared::projected) + MOMENTS, RAISED = sizeof(Shared::raised) + MOMENTS;
constexpr u32 ATTENDED = TEXTS * HEAD * 2, HIDDEN = RANKS * sizeof(Shared::own_hidden);

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

const uint4* wait_for_chunk(Shared& shared, int number) {
  wait_for_fetched(&shared.chunk_arrived[number % SLOTS], number / SLOTS % 2);
  return shared.chunks[number % SLOTS];
}

// Of several chunks that nobody reads any more, each thread of a warp asks for what takes the place of one.
void replace_chunks(Shared& shared, const Part& part, int first, int count) {
  if (threadIdx.x / 32 == 1 && threadIdx.x % 32 < count) {
    ask_for_chunk(shared, part, first + threadIdx.x % 32 + SLOTS);
  }
}

void ask_for_rows(Shared& shared, const Part& part, int layer) {
  if (layer >= LAYERS) return;
  u64* arrived = &shared.rows_arrived[layer % 2];
  const int place = blockIdx.x * LAYERS + layer;
  expect(arrived, part.attends() * sizeof(HeadRows) + sizeof(FeedRows));
  if (part.attends()) fetch(&shared.head_rows[layer % 2], part.head_rows + place, sizeof(HeadRows), arrived);
  fetch(&shared.feed_rows[layer % 2], part.feed_rows + place, sizeof(FeedRows), arrived);
}

// Products of 16 texts with rows, 16 of which are a warp's, and perhaps 16 more.

template <int ROWS, int COLUMNS>
struct Product {
  static constexpr int PAIRS = ROWS / 16, STEPS = COLUMNS / 32, MINE = (PAIRS + WARPS - 1) / WARPS;
  static constexpr bool IN_ONE = CHUNK % (2 * STEPS) == 0;  // 16 rows are in one chunk, else in two
  static_assert(IN_ONE || (STEPS <= CHUNK / 2 + 1 && CHUNK % 2 == 0), "in two at most");
  static_assert(ROWS / 8 * STEPS / CHUNK <= SLOTS, "they are not there at once");
  float sums[MINE][2][4] = {};

  static int pair(int i) { return threadIdx.x / 32 + i * WARPS; }
  static bool has(int i) { return PAIRS % WARPS == 0 || pair(i) < PAIRS; }

  // With rows that are in chunks from `first` on.
  Product(Shared& shared, const uint4* texts, int first) {
    const int lane = threadIdx.x % 32;
    const uint4 *four = texts + lane % 4 * FOUR + lane / 4, *here[MINE], *then[MINE];
    int left[MINE];  // in the first of two chunks
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (!has(i)) continue;
      const int tile = pair(i) * 2 * STEPS, number = first + tile / CHUNK;
      left[i] = CHUNK - tile % CHUNK;
      here[i] = wait_for_chunk(shared, number) + tile % CHUNK * 32 + lane;
      if (!IN_ONE && left[i] < 2 * STEPS) then[i] = wait_for_chunk(shared, number + 1) - left[i] * 32 + lane;
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const uint4 low = four[step * 8 * FOUR], high = four[(step * 8 + 4) * FOUR];
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        if (!has(i)) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int tile = half * STEPS + step;
          const uint4 row = (IN_ONE || tile < left[i] ? here[i] : then[i])[tile * 32];
          multiply(sums[i][half], low, row.x, row.y);
          multiply(sums[i][half], high, row.z, row.w);
        }
      }
    }
  }

  static int text(int half) { return threadIdx.x % 32 / 4 + 8 * half; }
  static int row(int i) { return pair(i) * 16 + threadIdx.x % 4 * 4; }
  float4 four_rows(int i, int half) const {  // of `text`, from `row` on
    const float *low = sums[i][0] + 2 * half, *high = sums[i][1] + 2 * half;
    return make_float4(low[0], low[1], high[0], high[1]);
  }

  template <typename Take>
  void give(Take take) const {  // text, row, four of them
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (!has(i)) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) take(text(half), row(i), four_rows(i, half));
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

// The residual stream: what is read, what is added to, and what is set to zero for the one after it. Of each text, one
// of those clusters that add to the stream also adds what it was, and the bias.

float* stream_at(float* work, int phase, int text, int column) {
  return work + (phase % 3 * TEXTS + text) * WIDTH + column;
}

void read_stream(Shared& shared, float* work, int phase, const Part& part, int clusters, u64* arrived) {
  const int text = threadIdx.x / 16, first = threadIdx.x % 16 * 4, slice = part.rank * SLICE;
  if (text < TEXTS) {
    float4 found[SLICE / 64];
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < SLICE / 64; i++) found[i] = read(stream_at(work, phase, text, slice + i * 64 + first));
#pragma unroll
    for (int i = 0; i < SLICE / 64; i++) {
      const float4 x = found[i];
      const int column = i * 64 + first;
      *four_columns(shared.stream, text, column) = bfloats(x);
      sum += (x.x + x.y) + (x.z + x.w);
      squares += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
      if (text % clusters == part.cluster) {
        four_of(&shared.residual[text / clusters][column]) = x;
        four_of(stream_at(work, phase + 2, text, slice + column)) = make_float4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int lanes = 8; lanes; lanes /= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
      squares += __shfl_xor_sync(~0u, squares, lanes);
    }
    const uint2 moments = make_uint2(__float_as_uint(sum), __float_as_uint(squares));
    if (threadIdx.x % 16 < RANKS) send(&shared.moments[part.rank][text], threadIdx.x % 16, moments, arrived);
  }
  __syncthreads();
}

template <typename Found>
void add_to_stream(const Shared& shared, float* work, int phase, const Part& part, int clusters,
                          const Found& found, const float* bias) {
  found.give([&](int text, int row, float4 x) {
    if (text % clusters == part.cluster)
      x = add(add(x, four_of(&shared.residual[text / clusters][row])), four_of(bias + row));
    add_to(stream_at(work, phase + 1, text, part.rank * SLICE + row), x);
  });
}

// Blocks of one rank wait until `enough` have added to their slice, this one among them if it `adds`. The thread that
// counts has nothing on its way from or to memory: it would have to wait for that too.
template <typename Work>
void meet_rank(u32* counter, bool adds, u32 enough, Work meanwhile) {
  const bool counts = threadIdx.x == STEPPERS;
  __syncthreads();
  if (counts && adds) count(counter);
  meanwhile();
  if (counts) wait_for_count(counter, enough);
  __syncthreads();
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
    const int own = i / ROWS, row = i % ROWS, text = part.rank * EACH + own;
    const float* from = &shared.projected[0][own][row];
    float4 x = normed(shared, text, from, EACH * ROWS, rows.sums + row, rows.bias + row);
    if (row < 2 * FEATURES) x = relu(x);
    if (row >= FEATURES && row < 2 * FEATURES) x = scaled(x, shared.keep[text]);
    four_of(&shared.qkv[own][row]) = x;
  }
  __syncthreads();
}

void finish_hidden(Shared& shared, const Part& part, const FeedRows& rows) {
  for (int i = threadIdx.x * 4; i < TEXTS * OWN; i += THREADS * 4) {
    const int text = i / OWN, unit = i % OWN;
    const float* from = &shared.raised[0][text][unit];
    const float4 x = normed(shared, text, from, TEXTS * OWN, rows.sums + unit, rows.bias + unit);
    *four_columns(shared.own_hidden, text, unit) = bfloats(relu(x));
  }
  before_sending();
  __syncthreads();
  if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < RANKS) {
    const uint4* to = shared.hidden + part.rank * texts_of(OWN);
    send(to, threadIdx.x / 32, shared.own_hidden, sizeof(shared.own_hidden), &shared.hidden_arrived);
  }
}

// The recurrent step: a thread has some numbers of S of one text, which nobody else reads or writes.

struct State {
  float4 S[PARTS][KEYS];
  float z;  // of key `lane`

  static int own() { return threadIdx.x / 128; }  // which of the rank's texts
  static int column(int part) { return part * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 4 * 4; }
  static int key(int i) { return i * 8 + threadIdx.x % 32 / 4; }
  static bool has_z() { return threadIdx.x % 32 < FEATURES; }

  static bool there(int layer, const Part& part) {
    return part.attends() && layer < LAYERS && threadIdx.x < STEPPERS && part.rank * EACH + own() < BATCH;
  }

  template <typename Use>
  void each(const Shared& shared, int layer, const Part& part, Use use) {  // number, and where it is
    if (!there(layer, part)) return;
    const int head = ((part.rank * EACH + own()) * HEADS + part.cluster) * FEATURES;
    float *S_at = shared.states[2 * layer] + head * HEAD, *z_at = shared.states[2 * layer + 1] + head;
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
      for (int j = 0; j < KEYS; j++) use(S[i][j], four_of(S_at + key(j) * HEAD + column(i)));
    if (has_z()) use(z, z_at[threadIdx.x % 32]);
  }

  void read(const Shared& shared, int layer, const Part& part) {
    each(shared, layer, part, [](auto& mine, auto& there) { mine = there; });
  }

  void write(const Shared& shared, int layer, const Part& part) {
    each(shared, layer, part, [](auto& mine, auto& there) { there = mine; });
  }

  // Takes in a key and a value, and gives all ranks what a query finds.
  void take_step(Shared& shared, const Part& part) {
    if (threadIdx.x >= STEPPERS) return;
    const float* qkv = shared.qkv[own()];
    const int lane = threadIdx.x % 32, text = part.rank * EACH + own();
    float below = 0;
    if (has_z()) {
      z += qkv[FEATURES + lane];
      below = qkv[lane] * z;
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) below += __shfl_xor_sync(~0u, below, lanes);
    const float scale = 1 / (CLAMP ? fmaxf(below, LEAST) : below + LEAST);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const float4 v = four_of(qkv + 2 * FEATURES + column(i));
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < KEYS; j++) {
        S[i][j] = add(S[i][j], qkv[FEATURES + key(j)], v);
        sum = add(sum, qkv[key(j)], S[i][j]);
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
        sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
        sum.z += __shfl_xor_sync(~0u, sum.z, lanes);
        sum.w += __shfl_xor_sync(~0u, sum.w, lanes);
      }
      uint2* to = four_columns(shared.attended, text, column(i));
      send(to, lane / 4, bfloats(scaled(sum, scale)), &shared.attended_arrived);  // as many as there are ranks
    }
  }
};

KERNEL(RANKS, THREADS) decode_step(POINTERS) {
  SHARED(Shared, shared);
  const Part part = {head_chunks, feed_chunks, head_rows, feed_rows};
  u32* counter = (u32*)(work + 3 * TEXTS * WIDTH) + part.rank * 32;

  if (threadIdx.x == 0) {
    float* const states[] = {STATES};
#pragma unroll
    for (int i = 0; i < 2 * LAYERS; i++) shared.states[i] = states[i];
    for (u64* one = shared.chunk_arrived; one <= &shared.hidden_arrived; one++) begin(one);
    all_have_begun();
    for (int i = 0; i < SLOTS; i++) ask_for_chunk(shared, part, i);
    ask_for_rows(shared, part, 0);
    expect(&shared.projected_arrived, PROJECTED);
    expect(&shared.attended_arrived, ATTENDED);
    expect(&shared.raised_arrived, RAISED);
    expect(&shared.hidden_arrived, HIDDEN);
  }
  if (threadIdx.x < TEXTS) shared.keep[threadIdx.x] = keep[threadIdx.x];
  __syncthreads();
  meet_cluster();
  State state = {};
  state.read(shared, 0, part);

  for (int layer = 0; layer < LAYERS; layer++) {
    const int attend = 2 * layer, feed = 2 * layer + 1;
    const int for_projections = layer * part.for_layer(), for_out = for_projections + FOR_PROJECTIONS;
    const int for_up = for_projections + part.attends() * FOR_HEAD, for_down = for_up + FOR_UP;
    const HeadRows& of_head = shared.head_rows[layer % 2];
    const FeedRows& of_feed = shared.feed_rows[layer % 2];

    if (part.attends()) {
      read_stream(shared, work, attend, part, HEADS, &shared.projected_arrived);
      Product<ROWS, SLICE>(shared, shared.stream, for_projections).give([&](int text, int row, float4 x) {
        send(&shared.projected[part.rank][text % EACH][row], text / EACH, x, &shared.projected_arrived);
      });
      wait_for_fetched(&shared.rows_arrived[layer % 2], layer / 2 % 2);
      receive(&shared.projected_arrived, layer, PROJECTED);
      finish_projections(shared, part, of_head);
      state.take_step(shared, part);
      replace_chunks(shared, part, for_projections, FOR_PROJECTIONS);
      receive(&shared.attended_arrived, layer, ATTENDED);
      const Product<SLICE, HEAD> found(shared, shared.attended, for_out);
      add_to_stream(shared, work, attend, part, HEADS, found, of_head.out_bias);
    }
    meet_rank(counter, part.attends(), layer * (HEADS + FEEDERS) + HEADS, [&] {
      if (part.attends()) replace_chunks(shared, part, for_out, FOR_OUT);
      if (threadIdx.x == 64) ask_for_rows(shared, part, layer + 1);
      state.write(shared, layer, part);
    });

    read_stream(shared, work, feed, part, FEEDERS, &shared.raised_arrived);
    Product<UNITS, SLICE>(shared, shared.stream, for_up).give([&](int text, int row, float4 x) {
      send(&shared.raised[part.rank][text][row % OWN], row / OWN, x, &shared.raised_arrived);
    });
    wait_for_fetched(&shared.rows_arrived[layer % 2], layer / 2 % 2);
    receive(&shared.raised_arrived, layer, RAISED);
    finish_hidden(shared, part, of_feed);
    replace_chunks(shared, part, for_up, FOR_UP);
    receive(&shared.hidden_arrived, layer, HIDDEN);
    const Product<SLICE, UNITS> found(shared, shared.hidden, for_down);
    add_to_stream(shared, work, feed, part, FEEDERS, found, of_feed.down_bias);
    meet_rank(counter, true, (layer + 1) * (HEADS + FEEDERS), [&] {
      replace_chunks(shared, part, for_down, FOR_DOWN);
      state.read(shared, layer + 1, part);
    });
  }
}
