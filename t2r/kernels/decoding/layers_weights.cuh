// all_layers.cu, part 2: weights, which warps load into shared memory long before they read them.
//
// Each warp has its own: a sequence of chunks of CHUNK_TILES tiles, in the order in which it reads them. It loads them
// into its ring, and loads the next one over each that it has read, across products, barriers and layers. So no warp waits
// for another one's. A slot of the ring is loaded at once; it has several chunks, where layers are small, because to wait
// for a slot and to start a copy takes about as long as to multiply a chunk. A chunk is of one output tile, or of
// OUTPUTS_AT_ONCE in turn: what a product reads is padded to whole chunks by tiles of zeros, so that a thread knows where
// each tile is, and multiplies them without any branch.
//
// Of LARGE layers, rings hold a small part: memory must not be idle, so each chunk that was read is loaded over at once.
// There the chunks that all warps read at about the same time are neighbours in global memory.

// Weights and what they are multiplied by, as operands of tensor cores: bfloat16, or float16 if weights have 8 bits,
// for a byte becomes float16 in half as many instructions. Activations are then scaled, for float16 ends at 65,504.

#if INT8
// Two of four integers, stored as 128 more: 0x64 before a byte makes 1,024 + the byte.
u32 two_integers(u32 four, u32 bytes) { return subtract_halves(permute(four, 0x64646464u, bytes), 0x64806480u); }
uint4 weights_of(Fragment x) {
  return make_uint4(two_integers(x.x, 0x4140), two_integers(x.x, 0x4342), two_integers(x.y, 0x4140),
                    two_integers(x.y, 0x4342));
}

constexpr float OPERAND_SCALE = 1.f / 8;  // up to 524,000; below 5e-4 digits are lost, as bfloat16 has them
u32 to_operands(float low, float high) { return to_halves(low * OPERAND_SCALE, high * OPERAND_SCALE); }
void multiply_weights(float (&sum)[4], uint4 x, u32 low, u32 high) { multiply_add_halves(sum, x, low, high); }
float4 unscaled(float4 sums, const float* scale) {  // of the weights of each output
  return multiplied(scaled(sums, 1 / OPERAND_SCALE), four_at(scale));
}
#else
uint4 weights_of(Fragment x) { return x; }
u32 to_operands(float low, float high) { return to_bfloats(low, high); }
void multiply_weights(float (&sum)[4], uint4 x, u32 low, u32 high) { multiply_add(sum, x, low, high); }
float4 unscaled(float4 sums, const float* scale) { return sums; }
#endif
uint2 to_operands(float4 x) { return make_uint2(to_operands(x.x, x.y), to_operands(x.z, x.w)); }

struct Chunk { Fragment tiles[CHUNK_TILES]; };  // what one thread has of it

struct Weights {
  Shared& shared;
  const int warp = same_in_warp(threadIdx.x / 32);
  Fragment* const ring = shared.ring[warp];
  u64* const loaded = shared.loaded[warp];  // a barrier for each slot of the ring
  const Fragment* next;                     // chunk to load
  int layer = -1, chunks = 0;               // that is loaded now; chunks of it that are left
  int free = 0;                             // slot that is loaded next
  int slot = 0, parity = 0, place = 0;      // that is read next: of its barrier, and the chunk's place in it
  int released = 0, empty = 0;              // chunks of the first slot that is in use; slots before it to load

  Weights(Shared& shared) : shared(shared) {
#pragma unroll 1
    for (int i = 0; i < SLOTS; i++) load_next();
  }

  void load_next() {
    while (chunks == 0 && layer + 1 < LAYERS) {
      const Layer& own = shared.fixed.layers[++layer];
      chunks = shared.fixed.chunks[layer][warp];
      next = own.weights + (u64)((blockIdx.x * WARPS + warp) * (LARGE ? 1 : own.chunks)) * CHUNK;
    }
    if (chunks == 0) return;  // all are loaded
    const int count = chunks < SLOT_CHUNKS ? chunks : SLOT_CHUNKS;
    if (lane() == 0) {
      expect_bytes(&loaded[free], count * CHUNK * sizeof(Fragment));
      load_once(ring + free * SLOT_CHUNKS * CHUNK, next, count * CHUNK * sizeof(Fragment), &loaded[free]);
    }
    next += (LARGE ? BLOCKS * WARPS : count) * CHUNK, chunks -= count;
    free = free + 1 < SLOTS ? free + 1 : 0;
  }

  Chunk read() {
    if (place == 0) {
      load();  // the slot may be one of these
      wait_for_loads(&loaded[slot], parity);
    }
    const Fragment* own = ring + (slot * SLOT_CHUNKS + place) * CHUNK + lane();
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; i++) chunk.tiles[i] = own[i * 32];
    if (++place == SLOT_CHUNKS) next_slot();
    return chunk;
  }

  void next_slot() {
    place = 0;
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }

  void release() {  // the first chunk that was read and not released
    if (++released < SLOT_CHUNKS) return;
    released = 0, empty++;
    if (LARGE) load();
  }

  // Starts to load over what was released. That takes some time, and what is read from global memory just after it waits
  // behind it: so it is called where a block waits for messages, not before a barrier of all blocks.
  void load() {
#pragma unroll 1
    for (; empty > 0; empty--) {
      __syncwarp();
      load_next();
    }
  }

  void end_layer() {  // its last slot may not be full
    if (released == 0) return;
    released = 0, empty++;
    next_slot();
  }
};
