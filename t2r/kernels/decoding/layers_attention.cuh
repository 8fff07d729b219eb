// all_layers.cu, part 3: attention of this rank's sequences, from queries, keys and values to outputs that are sent.

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
  Fixed& fixed = shared.fixed;
  u64* barrier = &fixed.vector_barrier[layer % 2];
  expect_bytes(barrier, sizeof(Vectors));
  load_async(&fixed.vectors[layer % 2], fixed.layers[layer].vectors + blockIdx.x, sizeof(Vectors), barrier);
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
    const int before_value = (QUERIES + 1) * (kind == MERGED ? FEATURES : HEAD_DIM);
    const float* value = kind == WINDOWED ? fixed.leaving[place] : fixed.qkv[place] + before_value;
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
        const float normaliser = NORMALIZER_CLAMPS ? fmaxf(d, NORMALIZER_VALUE) : d + NORMALIZER_VALUE;
        stage(fixed, place, r, column, scaled(n, 1 / normaliser));
      }
    }
  });
}

// The new key and value take their slot of the window, in shared and in global memory.
void enter_window(Fixed& fixed, const Role& role, const Layer& layer, int number, int head) {
  for (int item = threadIdx.x; item < RANK_ROWS * 2 * SLOT_WORDS; item += COMPUTING) {
    const int place = item / (2 * SLOT_WORDS), row = role.row(place);
    const int which = item / SLOT_WORDS % 2, word = item % SLOT_WORDS;  // of the key, or of the value
    if (row >= BATCH || fixed.keep[row] == 0) continue;
    const float* x = fixed.qkv[place] + (QUERIES + which) * HEAD_DIM + 2 * word;
    const int slot = slot_of(fixed.count[number][row]) * SLOT_WORDS + word;
    u32* all = (which ? layer.v : layer.k) + (u64)(row * KV_HEADS + head) * WINDOW_SLOTS * SLOT_WORDS;
    fixed.window[place][which][slot] = all[slot] = to_bfloats(x[0], x[1]);
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
    send_piece(shared, role.row(place), piece * 8, shared.fixed.staged[place * PIECES + piece], item % RANKS,
                &shared.fixed.attended_barrier);
  }
}
