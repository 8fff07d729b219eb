// all_layers.cu, part 2: weights, which warps load into shared memory long before they read them.
//
// Each warp has its own: a sequence of tiles, in the order in which it reads them. It loads them into its ring, and loads
// the next ones over those that it has read, across products, barriers and layers. So no warp waits for another one's.

#if INT8
// Two of four 8-bit integers, as bfloat16. 0x43 before a byte makes 128 + its lower 7 bits, or with only its sign bit
// 128 or 256; the difference is the integer.
u32 two_integers(u32 four, u32 bytes) {
  const u32 both = permute(four, 0x43434343u, bytes);
  return subtract_bfloats(both & 0xff7fff7fu, both & 0xff80ff80u);
}
uint4 weights_of(Fragment x) {
  return make_uint4(two_integers(x.x, 0x4140), two_integers(x.x, 0x4342), two_integers(x.y, 0x4140),
                    two_integers(x.y, 0x4342));
}
#else
uint4 weights_of(Fragment x) { return x; }
#endif

#if BULK_COPIES

// By bulk copies of whole chunks, which one thread starts, and a barrier for each slot of the ring.
struct Weights {
  Shared& shared;
  const int warp = same_in_warp(threadIdx.x / 32);
  Fragment* const ring = shared.ring[warp];
  u64* const loaded = shared.loaded[warp];
  const Fragment* next;                        // chunk to load
  int layer = -1, chunks = 0;                  // that is loaded now; chunks of it that are left
  int free = 0;                                // the slot that is loaded next
  int waited = 0;                              // the slot that is waited for next
  u32 parity = 0;                              // of its barrier
  int tile = 0;                                // the next one, in the ring
  int available = 0, unreleased = 0;           // tiles that can be read, and that were read but are not loaded over yet

  Weights(Shared& shared) : shared(shared) {
    for (int slot = 0; slot < SLOTS; slot++) load_next();
  }

  void load_next() {
    while (chunks == 0 && layer + 1 < LAYERS) {
      const Layer& own = shared.fixed.layers[++layer];
      chunks = (shared.fixed.tiles[layer][warp] + CHUNK_TILES - 1) / CHUNK_TILES;
      next = own.weights + (u64)((blockIdx.x * WARPS + warp) * own.chunks) * CHUNK;
    }
    if (chunks == 0) return;  // all are loaded
    if (lane() == 0) {
      u64* barrier = &loaded[free];
      expect_bytes(barrier, CHUNK * sizeof(Fragment));
      load_async(ring + free * CHUNK, next, CHUNK * sizeof(Fragment), barrier);
    }
    next += CHUNK, chunks--;
    free = free + 1 < SLOTS ? free + 1 : 0;
  }

  void wait_for(int count) {
#pragma unroll 1
    while (available < count) {
      wait_for_loads(&loaded[waited], parity);
      available += CHUNK_TILES;
      if (++waited == SLOTS) waited = 0, parity ^= 1;
    }
  }

  void move_on(int count) {  // these tiles will not be read any more
    tile += count, available -= count, unreleased += count;
    if (tile >= SLOTS * CHUNK_TILES) tile -= SLOTS * CHUNK_TILES;
    if (unreleased < CHUNK_TILES) return;
    __syncwarp();
    for (; unreleased >= CHUNK_TILES; unreleased -= CHUNK_TILES) load_next();
  }

  Fragment at(int number) const {  // of the next tiles
    const int place = tile + number;
    return ring[(place < SLOTS * CHUNK_TILES ? place : place - SLOTS * CHUNK_TILES) * 32 + lane()];
  }

  void end_layer(int number) {  // the last chunk of a layer may have tiles that are nothing
    const int padding = -shared.fixed.tiles[number][warp] & (CHUNK_TILES - 1);
    if (padding) move_on(padding);
  }
};

#else

// By copies of each thread: it loads the weights of a tile that it will itself multiply, so that nobody else has to be
// waited for. Not measured yet: see results/NOTES.md.
struct Weights {
  static constexpr int RING = SLOTS * CHUNK_TILES;  // tiles, each of which is one group of copies

  Shared& shared;
  const int warp = same_in_warp(threadIdx.x / 32);
  Fragment* const ring = shared.ring[warp] + lane();
  const Fragment* next;         // tile to load
  int layer = -1, left = 0;     // that is loaded now; tiles of it that are left
  int tile = 0;                 // the next one, in the ring; the one before it was loaded last

  Weights(Shared& shared) : shared(shared) {
    for (int place = 0; place < RING; place++) load_next(place);
  }

  void load_next(int place) {
    while (left == 0 && layer + 1 < LAYERS) {
      const Layer& own = shared.fixed.layers[++layer];
      left = shared.fixed.tiles[layer][warp];
      next = own.weights + (u64)((blockIdx.x * WARPS + warp) * own.chunks) * CHUNK + lane();
    }
    if (left > 0) {
      copy_async(ring + place * 32, next);
      next += 32, left--;
    }
    commit_copies();  // when all are loaded a group of none, so that as many are pending as always
  }

  void wait_for(int count) {  // of RING groups the first `count`, or some more
    if (count <= 2) wait_for_copies<RING - 2>();
    else if (count <= 4) wait_for_copies<RING - 4>();
    else if (count <= 8) wait_for_copies<RING - 8>();
    else wait_for_copies<RING - TILES_OF_REGISTERS>();
  }

  int after(int place, int count) const { return place + count < RING ? place + count : place + count - RING; }

  void move_on(int count) {  // these tiles will not be read any more
#pragma unroll 1
    for (int i = 0; i < count; i++) load_next(tile), tile = after(tile, 1);
  }

  Fragment at(int number) const { return ring[after(tile, number) * 32]; }  // of the next tiles
  void end_layer(int) {}
};

#endif
