// All layers of a decoding step in one kernel, for transformers of many kinds, by the functions of hopper.cuh.
//
// Thread blocks, one on each multiprocessor, form clusters of RANKS. Both halves of a layer have the same plan:
//
//   1. first product      each rank has some outputs, for all channels of the residual stream x, in global memory
//   2. what is local      attention: a rank has some sequences;  feed-forward: the activation
//   3. exchange           each rank sends its part of the result to all ranks of the cluster
//   4. second product     each rank has some channels of the stream, to which all clusters add their results
//   5. barrier of all blocks
//
// A layer with cross attention counts as two, of which the first has no feed-forward: then there are three such halves.
//
// In attention a cluster has a key/value head with its query heads (or several heads, one after the other; or some of
// the query heads; or none). In the feed-forward it has a share of the units. So blocks of different clusters wait for
// each other only twice a layer.
//
// Weights do not depend on activations: each warp loads its own, in the order in which it will read them, into a ring of
// chunks in shared memory, across products, barriers and layers. The memory is never idle while rings have space.
//
// The stream has three buffers. Phase p (two for each layer) reads buffer p, adds to p + 1, and while it waits sets
// p + 2 to zero (modulo 3). The residual is one more contribution to the sum: a cluster that has little else to do adds x
// itself, in attention the last one, which has fewest heads, in the feed-forward the first, which has fewest units.
//
// The parts: layers_plan.cuh, layers_weights.cuh, layers_products.cuh, layers_attention.cuh, and here the course of a
// layer.

constexpr u32 STREAM_READ_CYCLES = 4000;  // of a phase: by then the blocks that have a head have read the stream

// Waits for messages of other ranks; then the next ones may come, of a number of bytes that depends on the layer.
void receive(Exchanges& exchanges, Exchange which, u64* barrier, u32 bytes) {
  if (threadIdx.x == 0) expect_bytes(barrier, bytes);
  wait_for_sends(barrier, exchanges.next(which));
}

template <bool IS_SOFTMAX>
void attention(Shared& shared, Weights& weights, const Streams& streams, int number, Exchanges& exchanges) {
  const float* x = streams.from;
  float* to = streams.to;
  Fixed& fixed = shared.fixed;
  const Layer& layer = fixed.layers[number];
  const Role<IS_SOFTMAX> role(layer.kind);
  const Vectors& vectors = fixed.vectors[number % 2];
  const bool has_norm = !NORMS_AFTER || number > 0, adds_residual = role.cluster == CLUSTERS - 1;
  if (adds_residual && role.heads == 0) add_residual(shared, role, x, to, vectors.attention, has_norm, false);
  if (role.heads == 0) {
    zero_share(streams.unused);
    if (weights.empty > 0) pause(STREAM_READ_CYCLES);  // what other blocks read would wait behind these loads
    weights.load();
  }
  for (int i = 0; i < role.heads; i++) {
    const int head = role.head + i * CLUSTERS;
    const HeadVectors& own = vectors.heads[i];
    u32 rank_rows = 0;
    for (int place = 0; place < RANK_ROWS; place++) rank_rows += role.row(place) < BATCH;
    stream_product(
        shared, weights, x, role.qkv_tiles(), has_norm, own.qkv.sums, own.qkv.bias, own.qkv.scale, number, 1,
        [&](int tile, int row, int output, float4 four) {
          if (!role.has(row)) return;
          const int index = (role.rank + tile * RANKS) * 16 + output, n = row / role.replicas;
          if (is_merged(layer.kind) && index < (role.queries + 1) * FEATURES) {
            four = make_float4(fmaxf(four.x, 0.f), fmaxf(four.y, 0.f), fmaxf(four.z, 0.f), fmaxf(four.w, 0.f));
          }
          for (int split = 0; split < role.splits; split++) {
            send(&fixed.qkv[role.place_of(n)][index], role.rank_of(n, split), four, &fixed.qkv_barrier);
          }
        });
    MARK(number, 3);
    const auto has = [&](int row) { return role.has(row); };
    if (adds_residual && i == 0) {
      add_residual(shared, role, x, to, vectors.attention, has_norm, role.qkv_tiles() > 0);
    }
    if (i == 0) zero_share(streams.unused);
    weights.load();
    receive(exchanges, QKV, &fixed.qkv_barrier, rank_rows * role.qkv * 4);
    MARK(number, 4);
    if (!is_merged(layer.kind) && !is_cross(layer.kind)) prepare(fixed, role, layer, own);
    if constexpr (IS_SOFTMAX) {
      softmax_attention(shared, role, layer, number, head, exchanges);
    } else {
      wait_for_loads(&fixed.state_barrier, exchanges.next(STATES));
      map_features(fixed, role, number, layer.kind, own);
      const bool has_window = HAS_WINDOW && layer.kind == WINDOWED;
      if (has_window) enter_window(fixed, role, layer, number, head);
      linear_step(fixed, role, layer.kind);
      if (has_window) {
        sync();
        attend_to_window(fixed, role, number, own);
        window_outputs(fixed, role, own);
      }
      fence_before_store();
      sync();
    }
    MARK(number, 5);
    send_attended(shared, role);
    const bool moves_state = threadIdx.x == MOVER && !IS_SOFTMAX;
    if constexpr (!IS_SOFTMAX) {
      if (moves_state && !is_cross(layer.kind)) store_state(shared, layer, role, head);
    }
    OperandProduct product(weights, role, role.attended);
    receive(exchanges, ATTENDED, &fixed.attended_barrier, role.rows() * role.attended * 2);
    MARK(number, 6);
    product.run(shared, vectors.attention.scale, to, has);
    if (moves_state) {
      wait_until_read();
      load_state(shared, number, i + 1);
    }
    sync();
  }
}

void feed_forward(Shared& shared, Weights& weights, const Streams& streams, int number, Exchanges& exchanges) {
  const float* x = streams.from;
  float* to = streams.to;
  Fixed& fixed = shared.fixed;
  const StateRole role(fixed.layers[number].kind);  // units are the same in all layers
  const Vectors& vectors = fixed.vectors[number % 2];
  const bool adds_residual = role.cluster == 0;
  if (role.up_tiles() == 0) {  // there are more clusters than shares
    zero_share(streams.unused);
    if (adds_residual) add_residual(shared, role, x, to, vectors.feedforward, true, false);
    return;
  }
  const auto& up = vectors.up;
  stream_product(shared, weights, x, role.up_tiles(), true, up.sums, up.bias, up.scale, number, 9,
                 [&](int tile, int row, int output, float4 four) {
    u32* own = (u32*)fixed.staged + (tile * ROWS + row) * (UNIT_TILE / 2);
    if (GATED) {  // two gates, then two units
      own[output / 4] = to_operands(activated(four.x) * four.z, activated(four.y) * four.w);
    } else {
      *(uint2*)(own + output / 2) =
          to_operands(make_float4(activated(four.x), activated(four.y), activated(four.z), activated(four.w)));
    }
  });
  MARK(number, 11);
  constexpr int PIECES = UNIT_TILE / 8;
  for (u32 item = threadIdx.x; item < role.up_tiles() * ROWS * PIECES * RANKS; item += THREADS) {
    const int number = item / RANKS, piece = number % PIECES, row = number / PIECES % ROWS;
    const int tile = role.rank * role.up_tiles() + number / (PIECES * ROWS);  // of the cluster
    if (row >= BATCH) continue;
    send_piece(shared, row, tile * UNIT_TILE + piece * 8, fixed.staged[number], item % RANKS, &fixed.hidden_barrier);
  }
  const auto has = [](int row) { return row < BATCH; };
  if (adds_residual) add_residual(shared, role, x, to, vectors.feedforward, true, true);
  zero_share(streams.unused);
  weights.load();
  OperandProduct product(weights, role, role.units());
  receive(exchanges, HIDDEN, &fixed.hidden_barrier, BATCH * role.units() * 2);
  MARK(number, 12);
  product.run(shared, vectors.feedforward.scale, to, has);
}

// The barrier of all blocks that ends a phase: what they have added to the stream before it can be read after it.
// `number` counts these barriers.
void sync_blocks(float* work, int number) {
  u32* counters = (u32*)(work + 3 * ROWS * WIDTH);  // one for each rank, each in its own cache line
  sync();
  if (threadIdx.x == 0) increment(counters + blockIdx.x % RANKS * 32);
  if (threadIdx.x < RANKS) wait_for_count(counters + threadIdx.x * 32, (number + 1) * CLUSTERS);
  sync();
}

// At the end: the numbers of tokens of windows and caches.
void count_tokens(const Fixed& fixed) {
  if (blockIdx.x > 0) return;
  for (int layer = 0; layer < LAYERS; layer++) {
    const Layer& own = fixed.layers[layer];
    const int row = threadIdx.x;
    if (own.kind == WINDOWED && row < BATCH) own.count[row] = fixed.count[layer][row] + (fixed.keep[row] > 0);
    if (own.kind == SOFTMAX && row < (OWN_LENGTHS ? BATCH : 1)) own.count[row] = fixed.count[layer][row] + 1;
  }
}

void initialise(Shared& shared, const float* keep, const float* angles, const int* capacity) {
  Fixed& fixed = shared.fixed;
  if (threadIdx.x == 0) {
    for (auto& slots : shared.loaded) {
      for (u64& barrier : slots) init_barrier(&barrier, 1);
    }
    for (u64* barrier = fixed.vector_barrier; barrier <= &fixed.hidden_barrier; barrier++) init_barrier(barrier, 1);
    fence_barrier_init();
    expect_bytes(&fixed.parts_barrier, PARTS_BYTES);
    for (int i = 0; i < 2; i++) fixed.capacity[i] = capacity[i];
  }
  for (u32 i = threadIdx.x; i < ROWS; i += THREADS) fixed.keep[i] = i < BATCH ? keep[i] : 0;
  // Inputs that are padding have weights of zero: they must be numbers.
  for (u32 i = threadIdx.x; i < OPERAND / 8 * ROWS; i += THREADS) fixed.operand[i] = make_uint4(0, 0, 0, 0);
  if (PADDED) {  // features that no state has are multiplied by zero: they must be numbers
    for (int place = 0; place < RANK_ROWS; place++) {
      for (u32 i = threadIdx.x; i < S_SIZE; i += THREADS) fixed.S[place][i] = 0;
      for (u32 i = threadIdx.x; i < FEATURES; i += THREADS) fixed.z[place][i] = 0;
    }
  }
  for (u32 i = threadIdx.x; i < LAYERS * BATCH; i += THREADS) {
    const Layer& layer = fixed.layers[i / BATCH];
    const bool counts = layer.kind == WINDOWED || layer.kind == SOFTMAX;
    const int all = is_cross(layer.kind) ? capacity[1] : 0;  // of a source; padding is not valid
    const int index = layer.kind == WINDOWED || OWN_LENGTHS ? i % BATCH : 0;
    fixed.count[i / BATCH][i % BATCH] = counts ? layer.count[index] : all;
  }
  for (u32 i = threadIdx.x; i < LAYERS * WARPS; i += THREADS) {
    const int kind = fixed.layers[i / WARPS].kind, warp = i % WARPS;
    fixed.chunks[i / WARPS][warp] = is_softmax(kind) ? CacheRole(kind).chunks(warp) : StateRole(kind).chunks(warp);
  }
  // The cosines and sines of the sequences that this rank has: in softmax layers others than elsewhere.
  constexpr int SIZE = 2 * PAIRS > 0 ? 2 * PAIRS : 1, PLACES = ROTARY_TABLES * RANK_ROWS;
  for (u32 i = threadIdx.x; i < 2 * PLACES * 2 * PAIRS; i += THREADS) {
    const int table = i / SIZE / RANK_ROWS % ROTARY_TABLES, place = i / SIZE % RANK_ROWS;
    const int row = i / SIZE / PLACES ? StateRole(LINEAR).row(place) : CacheRole(SOFTMAX).row(place);
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
#ifdef CLOCK_POINTS
    fixed.clocks = clocks;
#endif
  }
  __syncthreads();
  initialise(shared, keep, angles, capacity);
  __syncthreads();
  sync_cluster();
  if (threadIdx.x == MOVER) {
    load_vectors(shared, 0);
    load_state(shared, 0, 0);
  }
  Weights weights(shared);
  Exchanges exchanges;
  constexpr int SYNCS = HEAD_PARTS > 1;  // before the first phase
  wait_for_state(fixed, 0, exchanges.parity(STATES));
  if (SYNCS) sync_blocks(work, 0);
  for (int layer = 0; layer < LAYERS; layer++) {
    int phase = TRANSLATES ? layer / 2 * 3 + layer % 2 : 2 * layer;
    if (threadIdx.x == MOVER) load_vectors(shared, layer + 1);
    wait_for_loads(&fixed.vector_barrier[layer % 2], layer / 2 % 2);
    MARK(layer, 0);
    if (is_softmax(fixed.layers[layer].kind)) {
      attention<true>(shared, weights, Streams(work, phase), layer, exchanges);
    } else {
      attention<false>(shared, weights, Streams(work, phase), layer, exchanges);
    }
    MARK(layer, 7);
    const bool has_units = StateRole(fixed.layers[layer].kind).has_units;
    if (!has_units) {
      weights.end_layer();
      wait_for_state(fixed, layer + 1, exchanges.parity(STATES));
    }
    sync_blocks(work, SYNCS + phase++);
    MARK(layer, 8);
    if (has_units) {
      feed_forward(shared, weights, Streams(work, phase), layer, exchanges);
      MARK(layer, 13);
      weights.end_layer();
      wait_for_state(fixed, layer + 1, exchanges.parity(STATES));
      sync_blocks(work, SYNCS + phase++);
      MARK(layer, 14);
    }
  }
  count_tokens(fixed);
  if (threadIdx.x == MOVER) wait_until_stored();
  __syncthreads();
  sync_cluster();  // no block ends while others may still send to it
}
