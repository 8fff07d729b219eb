// all_layers.cu, part 4: attention of this rank's sequences, from queries, keys and values to outputs that are sent.

// State: S and z, and the slots of a window, of this rank's sequences. One thread loads them ahead, and stores S and z.

struct StatePart {  // bytes
  const u32 z, S = z * HEAD_DIM, window = HAS_WINDOW ? WINDOW_SLOTS * SLOT_WORDS * 4 : 0;

  StatePart(const Layer& layer) : z((PADDED ? layer.features : FEATURES) * 4) {}
};

template <typename Use>
void for_each_state(const StateRole& role, int head, int kind, Use use) {  // use(place, index of the sequence's head)
  for (int place = 0; place < RANK_ROWS; place++) {
    if (role.row(place) < BATCH) use(place, role.row(place) / sharing(kind) * KV_HEADS + head / role.parts);
  }
}

// The item after head `i` of a layer is the next head, or the first head of the next layer that has a state to load.
void load_state(Shared& shared, int layer, int i) {
  for (; layer < LAYERS; layer++, i = 0) {
    const Layer& own = shared.fixed.layers[layer];
    const StateRole role(own.kind);
    if (is_softmax(own.kind) || i >= role.heads) continue;
    const StatePart part(own);
    const u32 slots = own.kind == WINDOWED ? part.window : 0;
    u32 bytes = 0;
    for_each_state(role, 0, own.kind, [&](int, int) { bytes += part.S + part.z + 2 * slots; });
    u64* barrier = &shared.fixed.state_barrier;
    expect_bytes(barrier, bytes);
    for_each_state(role, role.head + i * CLUSTERS, own.kind, [&](int place, int index) {
      load_once(shared.fixed.S[place], own.S + (u64)index * (part.S / 4), part.S, barrier);
      load_once(shared.fixed.z[place], own.z + (u64)index * (part.z / 4), part.z, barrier);
      if (slots) {
        load_once(shared.fixed.window[place][0], own.k + (u64)index * (slots / 4), slots, barrier);
        load_once(shared.fixed.window[place][1], own.v + (u64)index * (slots / 4), slots, barrier);
      }
    });
    return;
  }
}

void store_state(Shared& shared, const Layer& layer, const StateRole& role, int head) {
  if (head % role.parts > 0) return;
  const StatePart part(layer);
  for_each_state(role, head, layer.kind, [&](int place, int index) {
    store_async(layer.S + (u64)index * (part.S / 4), shared.fixed.S[place], part.S);
    store_async(layer.z + (u64)index * (part.z / 4), shared.fixed.new_z[place], part.z);
  });
  commit_stores();
}

// All clusters that share a head have its state before the first of them changes it: called before the barrier of all
// blocks that precedes this layer. The next state that was loaded is that of this layer.
void wait_for_state(Fixed& fixed, int layer, u32 parity) {
  if (HEAD_PARTS == 1 || layer >= LAYERS || is_softmax(fixed.layers[layer].kind)) return;
  if (StateRole(fixed.layers[layer].kind).heads > 0) wait_for_loads(&fixed.state_barrier, parity);
}

void load_vectors(Shared& shared, int layer) {
  if (layer >= LAYERS) return;
  Fixed& fixed = shared.fixed;
  u64* barrier = &fixed.vector_barrier[layer % 2];
  expect_bytes(barrier, sizeof(Vectors));
  load_once(&fixed.vectors[layer % 2], fixed.layers[layer].vectors + blockIdx.x, sizeof(Vectors), barrier);
}

// Attention. Warps divide items among themselves: use(place, item) for `items` of each of this rank's sequences.
template <typename AnyRole, typename Use>
void for_each_by_warp(const AnyRole& role, int items, Use use) {
  for (int i = warp(); i < RANK_ROWS * items; i += WARPS) {
    if (role.row(i / items) < BATCH) use(i / items, i % items);
  }
}

// Normalises and rotates queries and the key.
template <typename AnyRole>
void prepare(Fixed& fixed, const AnyRole& role, const Layer& layer, const HeadVectors& vectors) {
  for_each_by_warp(role, role.queries + 1, [&](int place, int head) {
    float* x = fixed.qkv[place] + head * HEAD_DIM;
    if (QUERY_NORM) {
      const float* scale = head < role.queries ? vectors.query_scale : vectors.key_scale;
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

int group() { return lane() / 4; }
int quarter() { return lane() % 4; }

constexpr int OWN_QUERIES = StateRole::queries;
constexpr int MAPPED = RANK_ROWS * (OWN_QUERIES + 1);  // vectors that φ maps: of each sequence its queries, then a key

// Hedgehog's φ, from its exponents; by a warp.
void softmax_of_features(float (&features)[FEATURES], bool is_mapped) {
  float largest = -1e30f, sum = 0;
  for (int f = lane(); f < FEATURES; f += 32) largest = fmaxf(largest, features[f]);
  largest = largest_over_lanes(largest, 1, 16);
  for (int f = lane(); f < FEATURES; f += 32) sum += features[f] = expf(features[f] - largest);
  sum = sum_over_lanes(sum, 1, 16);
  for (int f = lane(); f < FEATURES; f += 32) features[f] = is_mapped ? features[f] / sum : 0;
}

// φ of all queries, and of the key that enters S and z: the new one, or the one that leaves the window, if one does;
// otherwise the key's is zero. Cross attention has no key. By tensor cores: 16 vectors with 8 features, of which thread
// (g, c) of 8 × 4 has 2c and 2c + 1 of vectors g and g + 8. The order of channels in a sum is free: a thread has four
// consecutive ones of 16.
void map_features(Fixed& fixed, const StateRole& role, int layer, int kind, const HeadVectors& vectors) {
  const auto enters = [&](int row) { return kind == WINDOWED ? leaves(fixed, layer, row) : fixed.keep[row] > 0; };
  if (is_merged(kind)) {
    for (u32 item = threadIdx.x; item < MAPPED * FEATURES; item += THREADS) {
      const int place = item / ((OWN_QUERIES + 1) * FEATURES), head = item / FEATURES % (OWN_QUERIES + 1), f = item % FEATURES;
      if (role.row(place) >= BATCH) continue;
      const bool is_mapped = head < OWN_QUERIES || (!is_cross(kind) && enters(role.row(place)));
      fixed.features[place][head][f] = is_mapped ? fixed.qkv[place][head * FEATURES + f] : 0;
    }
  } else {
    for (int item = warp(); item < (MAPPED + 15) / 16 * (FEATURES / 8); item += WARPS) {
      const int first = item / (FEATURES / 8) * 16 + group(), feature = item % (FEATURES / 8) * 8;
      const float* x[2];
      const u32* old[2] = {};  // instead of a key that enters a window, the one that leaves it
#pragma unroll
      for (int half = 0; half < 2; half++) {  // vectors that do not exist are others, in vain
        const int vector = first + 8 * half < MAPPED ? first + 8 * half : 0;
        const int place = vector / (OWN_QUERIES + 1), head = vector % (OWN_QUERIES + 1), row = role.row(place);
        x[half] = fixed.qkv[place] + head * HEAD_DIM + quarter() * 4;
        if (HAS_WINDOW && kind == WINDOWED && head == OWN_QUERIES && row < BATCH) {
          old[half] = fixed.window[place][0] + slot_of(fixed.count[layer][row]) * SLOT_WORDS + quarter() * 2;
        }
      }
      float sums[4] = {};
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; step++) {
        uint2 halves[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          halves[half] = to_bfloats(four_at(x[half] + step * 16));
          if (HAS_WINDOW && old[half]) halves[half] = *(const uint2*)(old[half] + step * 8);
        }
        const u32* map = vectors.map + (step * 8 + quarter() * 2) * FEATURES + feature + group();
        multiply_add(sums, make_uint4(halves[0].x, halves[1].x, halves[0].y, halves[1].y), map[0], map[FEATURES]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int vector = first + i / 2 * 8, f = feature + quarter() * 2 + i % 2;
        const int place = vector / (OWN_QUERIES + 1), head = vector % (OWN_QUERIES + 1), row = role.row(place);
        if (vector >= MAPPED || row >= BATCH) continue;
        const float mapped = sums[i] * (head < OWN_QUERIES ? MAP_QUERY_SCALE : 1) + vectors.map_bias[f];
        const bool is_mapped = head < OWN_QUERIES || (!is_cross(kind) && enters(row));
        fixed.features[place][head][f] = HEDGEHOG ? mapped : is_mapped ? fmaxf(mapped, 0.f) : 0;
      }
    }
    if (HEDGEHOG) {
      sync();
      for_each_by_warp(role, OWN_QUERIES + 1, [&](int place, int head) {
        const bool is_mapped = head < OWN_QUERIES || (!is_cross(kind) && enters(role.row(place)));
        softmax_of_features(fixed.features[place][head], is_mapped);
      });
    }
  }
  if (kind == WINDOWED) {
    for (u32 item = threadIdx.x; item < RANK_ROWS * HEAD_DIM; item += THREADS) {
      const int place = item / HEAD_DIM, d = item % HEAD_DIM, row = role.row(place);
      if (row >= BATCH) continue;
      const u32 both = fixed.window[place][1][slot_of(fixed.count[layer][row]) * SLOT_WORDS + d / 2];
      fixed.leaving[place][d] = leaves(fixed, layer, row) ? (d % 2 ? high_of(both) : low_of(both)) : 0;
    }
  }
  sync();
}

// Four attention outputs of one query head of a sequence, to be sent.
template <typename AnyRole>
void stage(Fixed& fixed, const AnyRole& role, int place, int query, int d, float4 four) {
  ((uint2*)fixed.staged)[(place * role.attended + query * HEAD_DIM + d) / 4] = to_operands(four);
}

// S + φ(k) ⊗ v and z + φ(k), and with them φ(q)·S and φ(q)·z. A warp has 16 columns of S: lanes are 8 parts of the
// features × 4 columns each. Without a window, the output is their quotient. All is loaded before anything is stored:
// the compiler does not know that these are different places.
void linear_step(Fixed& fixed, const StateRole& role, int kind) {
  constexpr int OWN = FEATURES / 8;
  for_each_by_warp(role, HEAD_DIM / 16, [&](int place, int slab) {
    const int column = slab * 16 + quarter() * 4;
    const int before_value = (OWN_QUERIES + 1) * (is_merged(kind) ? FEATURES : HEAD_DIM);
    const float* value = kind == WINDOWED ? fixed.leaving[place] : fixed.qkv[place] + before_value;
    const float4 v = is_cross(kind) ? make_float4(0, 0, 0, 0) : four_at(value + column);
    float4 S[OWN];
    float k[OWN], z[OWN], q[OWN_QUERIES][OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int f = group() + 8 * i;
      S[i] = four_at(&fixed.S[place][f * HEAD_DIM + column]);
      k[i] = fixed.features[place][OWN_QUERIES][f], z[i] = fixed.z[place][f];
#pragma unroll
      for (int r = 0; r < OWN_QUERIES; r++) q[r][i] = fixed.features[place][r][f];
    }
    float4 numerator[OWN_QUERIES] = {};
    float denominator[OWN_QUERIES] = {};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      S[i] = add(S[i], k[i], v), z[i] += k[i];
#pragma unroll
      for (int r = 0; r < OWN_QUERIES; r++) {
        numerator[r] = add(numerator[r], q[r][i], S[i]);
        denominator[r] += q[r][i] * z[i];
      }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int f = group() + 8 * i;
      four_at(&fixed.S[place][f * HEAD_DIM + column]) = S[i];
      if (slab == 0 && quarter() == 0) fixed.new_z[place][f] = z[i];
    }
#pragma unroll
    for (int r = 0; r < OWN_QUERIES; r++) {
      float4& n = numerator[r];
      n = make_float4(sum_over_lanes(n.x, 4, 16), sum_over_lanes(n.y, 4, 16), sum_over_lanes(n.z, 4, 16),
                      sum_over_lanes(n.w, 4, 16));
      denominator[r] = sum_over_lanes(denominator[r], 4, 16);
    }
    if (lane() >= 4) return;
#pragma unroll
    for (int r = 0; r < OWN_QUERIES; r++) {
      const float d = denominator[r];
      if (kind == WINDOWED) {
        four_at(&fixed.distant[place][r][column]) = numerator[r];
        if (slab == 0 && lane() == 0) fixed.distant[place][r][HEAD_DIM] = d;
      } else {
        const float normaliser = NORMALIZER_CLAMPS ? fmaxf(d, NORMALIZER_VALUE) : d + NORMALIZER_VALUE;
        stage(fixed, role, place, r, column, scaled(numerator[r], 1 / normaliser));
      }
    }
  });
}

// The new key and value take their slot of the window, in shared and in global memory.
void enter_window(Fixed& fixed, const StateRole& role, const Layer& layer, int number, int head) {
  for (u32 item = threadIdx.x; item < RANK_ROWS * 2 * SLOT_WORDS; item += THREADS) {
    const int place = item / (2 * SLOT_WORDS), row = role.row(place);
    const int which = item / SLOT_WORDS % 2, word = item % SLOT_WORDS;  // of the key, or of the value
    if (row >= BATCH || fixed.keep[row] == 0) continue;
    const float* x = fixed.qkv[place] + (OWN_QUERIES + which) * HEAD_DIM + 2 * word;
    const int slot = slot_of(fixed.count[number][row]) * SLOT_WORDS + word;
    u32* all = (which ? layer.v : layer.k) + (u64)(row * KV_HEADS + head / role.parts) * WINDOW_SLOTS * SLOT_WORDS;
    fixed.window[place][which][slot] = to_bfloats(x[0], x[1]);
    if (head % role.parts == 0) all[slot] = to_bfloats(x[0], x[1]);
  }
}

// Consecutive words, of two bfloat16 values each, of a key or value.
template <int COUNT>
struct Words {
  u32 words[COUNT];

  void load(const u32* from) {
    if (COUNT % 4 == 0) {
#pragma unroll
      for (int i = 0; i < COUNT / 4; i++) {
        const uint4 four = ((const uint4*)from)[i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i++) words[i] = from[i];
    }
  }
};

constexpr int LANE_WORDS = HEAD_DIM / 16;  // of a key, for each of 8 lanes

float dot(const float* q, const Words<LANE_WORDS>& k) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < LANE_WORDS; i++) sum += q[2 * i] * low_of(k.words[i]) + q[2 * i + 1] * high_of(k.words[i]);
  return sum;
}

// Softmax over the keys in a window. Warps that would have no query share the slots; then their results are merged.

constexpr int PART = HEAD_DIM + 4;  // of a query: numerators, sum, largest score; of a window also the mixture's
constexpr int WINDOW_PARTS = RANK_ROWS * OWN_QUERIES < WARPS ? WARPS / (RANK_ROWS * OWN_QUERIES) : 1;
constexpr int PART_SLOTS = share(share(WINDOW_SLOTS, 0, WINDOW_PARTS), 0, 4) * 4;  // a warp has four slots at once
static_assert(RANK_ROWS * OWN_QUERIES * WINDOW_PARTS * PART <= WARPS * REDUCED * ROWS * 16, "unsupported sizes");

float* window_part(Fixed& fixed, int place, int query, int part) {
  return (float*)fixed.partial + ((place * OWN_QUERIES + query) * WINDOW_PARTS + part) * PART;
}

void attend_to_window(Fixed& fixed, const StateRole& role, int layer, const HeadVectors& vectors) {
  for_each_by_warp(role, OWN_QUERIES * WINDOW_PARTS, [&](int place, int item) {
    const int r = item / WINDOW_PARTS, part = item % WINDOW_PARTS, row = role.row(place);
    const int count = fixed.count[layer][row] + (fixed.keep[row] > 0), first = part * PART_SLOTS;
    const int filled = count < WINDOW_SLOTS ? count : WINDOW_SLOTS;
    const int end = filled < first + PART_SLOTS ? filled : first + PART_SLOTS;
    const float* q = fixed.qkv[place] + r * HEAD_DIM;
    float *weights = fixed.scores[place][r], *own = window_part(fixed, place, r, part);
    float scores[PART_SLOTS / 4], largest = -1e30f, sum = 0, mixture = 0;
#pragma unroll
    for (int i = 0; i < PART_SLOTS / 4; i++) {
      const int slot = first + 4 * i + lane() / 8;
      Words<LANE_WORDS> k;
      k.load(fixed.window[place][0] + (slot < WINDOW_SLOTS ? slot : 0) * SLOT_WORDS + lane() % 8 * LANE_WORDS);
      scores[i] = QUERY_SCALE * sum_over_lanes(dot(q + lane() % 8 * 2 * LANE_WORDS, k), 1, 4);
      if (slot < end) largest = fmaxf(largest, scores[i]);
    }
    largest = largest_over_lanes(largest, 8, 16);
#pragma unroll
    for (int i = 0; i < PART_SLOTS / 4; i++) {
      const int slot = first + 4 * i + lane() / 8;
      const float weight = slot < end ? expf(scores[i] - largest) : 0;
      sum += weight;
      if (lane() % 8 == 0 && slot < end) weights[slot] = weight;
    }
    if (part == 0) {
      for (int i = lane(); i < HEAD_DIM; i += 32) mixture += q[i] * vectors.mixture[r * HEAD_DIM + i];
    }
    sum = sum_over_lanes(sum, 8, 16), mixture = sum_over_lanes(mixture, 1, 16);
    if (lane() == 0) four_at(own + HEAD_DIM) = make_float4(sum, largest, mixture, 0);
    __syncwarp();
    // Lanes divide channels among themselves, and if there are more of them also the slots.
    constexpr int QUADS = HEAD_DIM / 4, SHARES = 32 % QUADS == 0 ? 32 / QUADS : 1;
    const int share = SHARES > 1 ? lane() / QUADS : 0;
    for (int d = (SHARES > 1 ? lane() % QUADS : lane()) * 4; d < HEAD_DIM; d += 128) {
      float4 out = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int slot = first + share; slot < end; slot += SHARES) {
        const uint2 v = *(const uint2*)&fixed.window[place][1][slot * SLOT_WORDS + d / 2];
        out = add(out, weights[slot], make_float4(low_of(v.x), high_of(v.x), low_of(v.y), high_of(v.y)));
      }
      if (SHARES > 1) {
        out = make_float4(sum_over_lanes(out.x, QUADS, 16), sum_over_lanes(out.y, QUADS, 16),
                          sum_over_lanes(out.z, QUADS, 16), sum_over_lanes(out.w, QUADS, 16));
      }
      if (share == 0) four_at(own + d) = out;
    }
  });
  sync();
}

// Exact and distant keys under one normaliser: see t2r/attention/windowed.py.
void window_outputs(Fixed& fixed, const StateRole& role, const HeadVectors& vectors) {
  constexpr int QUADS = HEAD_DIM / 4;
  for (u32 item = threadIdx.x; item < RANK_ROWS * OWN_QUERIES * QUADS; item += THREADS) {
    const int place = item / (OWN_QUERIES * QUADS), r = item / QUADS % OWN_QUERIES, d = item % QUADS * 4;
    if (role.row(place) >= BATCH) continue;
    const float *parts = window_part(fixed, place, r, 0), *distant = fixed.distant[place][r];
    float largest = -1e30f;
#pragma unroll
    for (int i = 0; i < WINDOW_PARTS; i++) largest = fmaxf(largest, parts[i * PART + HEAD_DIM + 1]);
    const float mix = expf(fminf(parts[HEAD_DIM + 2] + vectors.mixture_bias[r] - largest, MOST_MIXTURE));
    float total = mix * fmaxf(distant[HEAD_DIM], 0.f);
    float4 out = scaled(four_at(distant + d), mix);
#pragma unroll
    for (int i = 0; i < WINDOW_PARTS; i++) {
      const float factor = expf(parts[i * PART + HEAD_DIM + 1] - largest);
      total += factor * parts[i * PART + HEAD_DIM];
      out = add(out, factor, four_at(parts + i * PART + d));
    }
    stage(fixed, role, place, r, d, scaled(out, 1 / (total > 0 ? total : 1)));
  }
}

// Softmax over this rank's part of a sequence's cache, by tensor cores: 16 rows of queries, of which most are nothing,
// with keys of 8 positions, then their weights with the values of 16. A warp has POSITIONS at once, and keeps a running
// maximum. Then the results of warps are merged, then those of the ranks that share the sequence.
//
// Sums do not depend on the order of what is summed, nor outputs on that of channels. So a thread loads consecutive words
// of a key, and of a value, as operands. Thread (g, c) of 8 × 4 has quarter c of the key at position g of 8; and eighth g
// of the values at positions 2c, 2c + 1, 2c + 8 and 2c + 9 of 16.

constexpr int POSITIONS = 16;
constexpr int FITTING_QUERIES = REDUCED * ROWS * 16 / PART < 16 ? REDUCED * ROWS * 16 / PART : 16;
constexpr int QUERIES_AT_ONCE = QUERIES < FITTING_QUERIES ? QUERIES : FITTING_QUERIES;
constexpr int HALVES = QUERIES_AT_ONCE > 8 ? 2 : 1;  // a thread has rows g and g + 8
static_assert(QUERIES_AT_ONCE > 0, "unsupported sizes");

struct RunningSoftmax {  // of a thread's rows, for its channels: 2c and 2c + 1 of each 8
  float largest[HALVES], sum[HALVES], out[HEAD_DIM / 8][4];

  RunningSoftmax() : out() {
    for (int half = 0; half < HALVES; half++) largest[half] = -1e30f, sum[half] = 0;
  }

  void rescale(int half, float new_largest) {
    const float factor = expf(largest[half] - new_largest);
    largest[half] = new_largest, sum[half] *= factor;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) out[i][2 * half] *= factor, out[i][2 * half + 1] *= factor;
  }
};

int channel_of(int tile, int which) { return (2 * quarter() + which) * (HEAD_DIM / 8) + tile; }

// The new token is not in the cache yet.
void attend_to_new_token(RunningSoftmax& softmax, const float* const (&q)[HALVES], const float* k, const float* v) {
  for (int half = 0; half < HALVES; half++) {
    float score = 0;
    for (int i = 0; i < HEAD_DIM / 4; i++) score += q[half][i] * k[quarter() * (HEAD_DIM / 4) + i];
    softmax.largest[half] = QUERY_SCALE * sum_over_lanes(score, 1, 2);
    softmax.sum[half] = quarter() == 0;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
      for (int which = 0; which < 2; which++) softmax.out[i][2 * half + which] = v[channel_of(i, which)];
  }
}

void attend_to_cache(Fixed& fixed, const CacheRole& role, const Layer& layer, int number, int head, int place,
                     int first) {
  constexpr int KEY_WORDS = HEAD_DIM / 8, VALUE_WORDS = HEAD_DIM / 16, TILES = POSITIONS / 8;
  const int row = role.row(place), capacity = fixed.capacity[is_cross(layer.kind)];
  const bool is_full = fixed.count[number][row] >= capacity;  // as a source is: there is no new token
  const int count = is_full ? capacity : fixed.count[number][row];
  const int own = row / sharing(layer.kind), sequence = own * KV_HEADS + head;
  const u32* keys = layer.k + (u64)sequence * capacity * SLOT_WORDS + quarter() * KEY_WORDS;
  const u32* values = layer.v + (u64)sequence * capacity * SLOT_WORDS + group() * VALUE_WORDS;
  const unsigned char* valid = layer.valid + (u64)own * capacity;
  const float* q[HALVES];  // this thread's quarter; rows that are nothing are the last query once more
  for (int half = 0; half < HALVES; half++) {
    const int query = first + group() + 8 * half;
    q[half] = fixed.qkv[place] + (query < QUERIES ? query : QUERIES - 1) * HEAD_DIM + quarter() * (HEAD_DIM / 4);
  }
  uint4 queries[HEAD_DIM / 16];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++) {
    const uint2 low = to_bfloats(four_at(q[0] + 4 * i));
    const uint2 high = HALVES > 1 ? to_bfloats(four_at(q[HALVES - 1] + 4 * i)) : make_uint2(0, 0);
    queries[i] = make_uint4(low.x, high.x, low.y, high.y);
  }
  RunningSoftmax softmax;
  if (role.split() == 0 && warp() == 0 && fixed.keep[row] > 0 && !is_full) {
    const float* new_key = fixed.qkv[place] + QUERIES * HEAD_DIM;
    attend_to_new_token(softmax, q, new_key, new_key + HEAD_DIM);
  }
  // Keys and values are loaded as soon as their registers are free: keys before the softmax, values after it.
  Words<KEY_WORDS> k[TILES];
  Words<VALUE_WORDS> v[TILES][2];
  bool is_valid;  // of the warp's positions, that of this lane
  const auto safe = [&](int position) { return (u32)(position < count ? position : 0) * SLOT_WORDS; };
  const auto load_keys = [&](int from) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) k[tile].load(keys + safe(from + tile * 8 + group()));
  };
  const auto load_values = [&](int from) {
    const int own = from + lane() % POSITIONS;
    is_valid = own < count && valid[own];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int which = 0; which < 2; which++) {
        const int position = from + tile * 8 + 2 * quarter() + which;
        v[tile][which].load(values + safe(position));
      }
  };
  const int stride = role.splits * WARPS * POSITIONS, begin = (role.split() * WARPS + warp()) * POSITIONS;
  load_keys(begin), load_values(begin);  // whether there are any or not: registers are taken by what may be undefined
#pragma unroll 1
  for (int from = begin; from < count; from += stride) {
    float scores[TILES][4] = {}, largest[HALVES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 16; i++) {
        multiply_add(scores[tile], queries[i], k[tile].words[2 * i], k[tile].words[2 * i + 1]);
      }
    load_keys(from + stride);
    const u32 allowed = __ballot_sync(~0u, is_valid) >> 2 * quarter();
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      largest[half] = softmax.largest[half];
#pragma unroll
      for (int i = 0; i < 2 * TILES; i++) {
        float& score = scores[i / 2][2 * half + i % 2];
        score = allowed >> (i / 2 * 8 + i % 2) & 1 ? QUERY_SCALE * score : -1e30f;
        largest[half] = fmaxf(largest[half], score);
      }
      softmax.rescale(half, largest_over_lanes(largest[half], 1, 2));
#pragma unroll
      for (int i = 0; i < 2 * TILES; i++) {
        float& score = scores[i / 2][2 * half + i % 2];
        score = allowed >> (i / 2 * 8 + i % 2) & 1 ? expf(score - softmax.largest[half]) : 0;
        softmax.sum[half] += score;
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {  // 16 positions
      const auto& low = scores[tile];
      const auto& high = scores[tile + 1];
      const uint4 weights = make_uint4(to_bfloats(low[0], low[1]), HALVES > 1 ? to_bfloats(low[2], low[3]) : 0,
                                       to_bfloats(high[0], high[1]), HALVES > 1 ? to_bfloats(high[2], high[3]) : 0);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; i++) {
        const u32 halves = i % 2 ? 0x7632 : 0x5410;  // value i of two positions
        multiply_add(softmax.out[i], weights, permute(v[tile][0].words[i / 2], v[tile][1].words[i / 2], halves),
                     permute(v[tile + 1][0].words[i / 2], v[tile + 1][1].words[i / 2], halves));
      }
    }
    load_values(from + stride);
  }
  float* merged = (float*)fixed.partial[warp()];  // of this warp: for each query numerators, sum, largest
  for (int half = 0; half < HALVES; half++) {
    const int r = group() + 8 * half;
    const float sum = sum_over_lanes(softmax.sum[half], 1, 2);
    if (r >= QUERIES_AT_ONCE) continue;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
      for (int which = 0; which < 2; which++) {
        merged[r * PART + channel_of(i, which)] = softmax.out[i][2 * half + which];
      }
    if (quarter() == 0) merged[r * PART + HEAD_DIM] = sum, merged[r * PART + HEAD_DIM + 1] = softmax.largest[half];
  }
}

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

constexpr u32 PARTS_BYTES = SPLITS * QUERIES * PART * 4;

void softmax_attention(Shared& shared, const CacheRole& role, const Layer& layer, int number, int head,
                       Exchanges& exchanges) {
  Fixed& fixed = shared.fixed;
  constexpr int QUARTERS = HEAD_DIM / 4 + 1;
  for (int place = 0; place < RANK_ROWS; place++) {
    const int row = role.row(place);
    if (row >= BATCH) continue;
    for (int first = 0; first < QUERIES; first += QUERIES_AT_ONCE) {
      attend_to_cache(fixed, role, layer, number, head, place, first);
      sync();
      const int stride = sizeof(fixed.partial[0]) / 4;
      for (u32 item = threadIdx.x; item < QUERIES_AT_ONCE * QUARTERS; item += THREADS) {
        const int r = item / QUARTERS, d = item % QUARTERS * 4;
        if (first + r >= QUERIES) continue;
        const float* parts = (const float*)fixed.partial[0] + r * PART;
        if (SPLITS > 1) {
          const float4 part = merge(parts, WARPS, stride, d, true);
          send(&fixed.parts[role.split()][first + r][d], role.rank - role.split(), part, &fixed.parts_barrier);
        } else if (d < HEAD_DIM) {
          stage(fixed, role, place, first + r, d, merge(parts, WARPS, stride, d, false));
        }
      }
      sync();
    }
    if (SPLITS > 1 && role.owns(place)) {
      wait_for_sends(&fixed.parts_barrier, exchanges.next(PARTS));
      if (threadIdx.x == 0) expect_bytes(&fixed.parts_barrier, PARTS_BYTES);
      for (u32 item = threadIdx.x; item < QUERIES * HEAD_DIM / 4; item += THREADS) {
        const int r = item / (HEAD_DIM / 4), d = item % (HEAD_DIM / 4) * 4;
        stage(fixed, role, place, r, d, merge(fixed.parts[0][r], SPLITS, QUERIES * PART, d, false));
      }
    }
    const int count = fixed.count[number][row], capacity = fixed.capacity[0];
    if (role.owns(place) && !is_cross(layer.kind) && count < capacity) {  // the new key and value; is it a real token?
      for (u32 item = threadIdx.x; item < 2 * SLOT_WORDS; item += THREADS) {
        const float* x = fixed.qkv[place] + (QUERIES + item / SLOT_WORDS) * HEAD_DIM + item % SLOT_WORDS * 2;
        u32* to = (item < SLOT_WORDS ? layer.k : layer.v) + (u64)(row * KV_HEADS + head) * capacity * SLOT_WORDS;
        to[(u64)count * SLOT_WORDS + item % SLOT_WORDS] = to_bfloats(x[0], x[1]);
      }
      if (head == 0 && threadIdx.x == 0) layer.valid[(u64)row * capacity + count] = fixed.keep[row] > 0;
    }
  }
  sync();
}

template <typename AnyRole>
void send_attended(Shared& shared, const AnyRole& role) {
  constexpr int PIECES = AnyRole::attended / 8;
  for (u32 item = threadIdx.x; item < RANK_ROWS * PIECES * RANKS; item += THREADS) {
    const int place = item / (PIECES * RANKS), piece = item / RANKS % PIECES;
    if (!role.owns(place)) continue;
    send_piece(shared, role.row(place), piece * 8, shared.fixed.staged[place * PIECES + piece], item % RANKS,
                &shared.fixed.attended_barrier);
  }
}
