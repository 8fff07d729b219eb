// all_layers.cu, part 2: weights, which warps load into shared memory long before they read them.
//
// Each warp has its own: a sequence of chunks of CHUNK_TILES tiles, in the order in which it reads them. It loads them
// into its ring, and loads the next one over each that it has read, across products, barriers and layers. So no warp waits
// for another one's. A chunk is of one output tile: what a product reads is padded to whole chunks by tiles of zeros, so
// that a thread knows where each tile is, and multiplies them without any branch.

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

struct Chunk { Fragment tiles[CHUNK_TILES]; };  // what one thread has of it

struct Weights {
  Shared& shared;
  const int warp = same_in_warp(threadIdx.x / 32);
  Fragment* const ring = shared.ring[warp];
  u64* const loaded = shared.loaded[warp];  // a barrier for each slot of the ring
  const Fragment* next;                     // chunk to load
  int layer = -1, chunks = 0;               // that is loaded now; chunks of it that are left
  int slot = 0, parity = 0;                 // that is read next, and of its barrier
  int free = 0;                             // slot that is loaded next

  Weights(Shared& shared) : shared(shared) {
#pragma unroll 1
    for (int i = 0; i < SLOTS; i++) load_next();
  }

  void load_next() {
    while (chunks == 0 && layer + 1 < LAYERS) {
      const Layer& own = shared.fixed.layers[++layer];
      chunks = shared.fixed.chunks[layer][warp];
      next = own.weights + (u64)((blockIdx.x * WARPS + warp) * own.chunks) * CHUNK;
    }
    if (chunks == 0) return;  // all are loaded
    if (lane() == 0) {
      expect_bytes(&loaded[free], CHUNK * sizeof(Fragment));
      load_async(ring + free * CHUNK, next, CHUNK * sizeof(Fragment), &loaded[free]);
    }
    next += CHUNK, chunks--;
    free = free + 1 < SLOTS ? free + 1 : 0;
  }

  Chunk read() {
    wait_for_loads(&loaded[slot], parity);
    const Fragment* own = ring + slot * CHUNK + lane();
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; i++) chunk.tiles[i] = own[i * 32];
    if (++slot == SLOTS) slot = 0, parity ^= 1;
    return chunk;
  }

  void release() {  // the first chunk that was read and not released: its weights have been multiplied
    __syncwarp();
    load_next();
  }
};
