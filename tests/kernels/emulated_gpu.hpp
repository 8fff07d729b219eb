// The functions of hopper.cuh for a CPU. Each GPU thread is a coroutine, which yields wherever it has to wait.
// This tests whether a kernel computes the right result and terminates. It does not test memory ordering: every write
// is visible to all threads at once.

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

typedef unsigned u32;
typedef unsigned long long u64;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline u32 __float_as_uint(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline float from_bits(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }

struct Index { u32 x; };

struct ThreadBarrier {
  int missing = 0;       // threads that have not arrived in this phase; 0: none has
  long phases_ended = 0;
};

struct Warp {
  ThreadBarrier barrier;
  u32 values[2][32][6];  // that threads exchange: of this exchange, and of the one before
};

struct Block {
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared;  // aligned
  ThreadBarrier barrier, named[4];  // of all threads, and of some
  std::vector<Warp> warps;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index block, thread;
  bool ended = false;
  long exchanges = 0;
};

static std::vector<Block> blocks;
static std::vector<ThreadBarrier> clusters;
static std::vector<Thread> threads;
static Thread* current;
static ucontext_t scheduler;
static u64 progress = 0;  // counts arrivals; if it does not grow, all threads wait for each other
static int threads_per_block, ranks_per_cluster;

#define blockIdx (current->block)
#define threadIdx (current->thread)
#define KERNEL(ranks, threads) void
#define SHARED(Type, name) Type& name = *(Type*)blocks[blockIdx.x].shared

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void synchronise(ThreadBarrier& barrier, int threads) {
  const long phase = barrier.phases_ended;
  progress++;
  if (!barrier.missing) barrier.missing = threads;
  if (!--barrier.missing) barrier.phases_ended++;
  while (barrier.phases_ended == phase) yield();
}

inline void __syncwarp() { synchronise(blocks[blockIdx.x].warps[threadIdx.x / 32].barrier, 32); }
inline void __syncthreads() { synchronise(blocks[blockIdx.x].barrier, threads_per_block); }
template <int ID, int COUNT>
void sync_threads() {
  synchronise(blocks[blockIdx.x].named[ID], COUNT);
}
inline int same_in_warp(int x) { return x; }
inline u32 recomputed(u32 x) { return x; }
inline u32 read_clock() { return 0; }
inline void pause(u32 cycles) {}
inline void sync_cluster() {
  synchronise(clusters[blockIdx.x / ranks_per_cluster], threads_per_block * ranks_per_cluster);
}

// Gives each thread of a warp the values of all 32 threads.
template <int COUNT>
u32 (*exchange(const u32 (&values)[COUNT]))[6] {
  Warp& warp = blocks[blockIdx.x].warps[threadIdx.x / 32];
  auto& exchanged = warp.values[current->exchanges++ % 2];
  std::memcpy(exchanged[threadIdx.x % 32], values, sizeof(values));
  synchronise(warp.barrier, 32);
  return exchanged;
}

inline u32 __shfl_xor_sync(u32, u32 x, int lanes) { return exchange<1>({x})[(threadIdx.x ^ lanes) % 32][0]; }
inline float __shfl_xor_sync(u32 all, float x, int lanes) {
  return from_bits(__shfl_xor_sync(all, __float_as_uint(x), lanes));
}
inline u32 __ballot_sync(u32, bool x) {
  const auto& all = exchange<1>({x});
  u32 bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= all[lane][0] << lane;
  return bits;
}

inline float bfloat(u32 both, int which) { return from_bits(which ? both & 0xffff0000u : both << 16); }

inline u32 rounded(float x) {  // to the nearest bfloat16, ties to even
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline u32 to_bfloats(float low, float high) { return rounded(high) << 16 | rounded(low); }

inline float half(u32 both, int which) {  // float16
  const u32 bits = which ? both >> 16 : both & 0xffff, exponent = bits >> 10 & 31, rest = bits & 1023;
  const float size = exponent == 31 ? (rest ? NAN : INFINITY)
                     : exponent ? std::ldexp(1024.f + rest, exponent - 25) : std::ldexp((float)rest, -24);
  return bits >> 15 ? -size : size;
}

inline u32 to_half(float x) {  // the nearest finite float16, ties to even
  const u32 sign = __float_as_uint(x) >> 31 << 15;
  if (std::isnan(x)) return sign | 0x7e00;
  if (std::fabs(x) >= 65504) return sign | 0x7bff;
  int exponent;
  std::frexp(x, &exponent);
  exponent = exponent < -13 ? -13 : exponent;
  const u32 steps = std::nearbyint(std::ldexp(std::fabs(x), 11 - exponent));  // up to 2,048: carries to the exponent
  return sign | (steps < 1024 ? steps : ((exponent + 14) << 10) + (steps - 1024));
}

inline u32 to_halves(float low, float high) { return to_half(high) << 16 | to_half(low); }

inline u32 subtract_halves(u32 x, u32 y) {
  return to_halves(half(x, 0) - half(y, 0), half(x, 1) - half(y, 1));
}
inline u32 permute(u32 x, u32 y, u32 bytes) {
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 number = bytes >> 4 * i & 7;
    result |= ((number < 4 ? x : y) >> 8 * (number % 4) & 255) << 8 * i;
  }
  return result;
}

template <typename Number>
void multiply_add(float (&sum)[4], uint4 x, u32 low, u32 high, Number number) {
  const auto operands = exchange<6>({x.x, x.y, x.z, x.w, low, high});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const int sequence = lane / 4 + i / 2 * 8, output = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const u32* activations = operands[sequence % 8 * 4 + k % 8 / 2];
      const u32* weights = operands[output * 4 + k % 8 / 2];
      sum[i] += number(activations[sequence / 8 + k / 8 * 2], k % 2) * number(weights[4 + k / 8], k % 2);
    }
  }
}
inline void multiply_add(float (&sum)[4], uint4 x, u32 low, u32 high) { multiply_add(sum, x, low, high, bfloat); }
inline void multiply_add_halves(float (&sum)[4], uint4 x, u32 low, u32 high) { multiply_add(sum, x, low, high, half); }

// A barrier that counts bytes and arrivals of threads (mbarrier).
struct ByteBarrier {
  int missing;  // bytes that were expected and have not arrived; negative if they arrive before they are expected
  unsigned phase : 1, arrivals : 15, missing_arrivals : 16;  // `arrivals` are needed in each phase
};
static_assert(sizeof(ByteBarrier) == sizeof(u64), "");

inline ByteBarrier& emulated(const u64* barrier) { return *(ByteBarrier*)barrier; }

inline void arrive(ByteBarrier& barrier, int bytes) {
  progress++;
  barrier.missing -= bytes;
  if (!barrier.missing_arrivals && !barrier.missing) {
    barrier.phase ^= 1;
    barrier.missing_arrivals = barrier.arrivals;
  }
}

inline void init_barrier(u64* barrier, u32 arrivals = 1) { emulated(barrier) = {0, 0, arrivals, arrivals}; }
inline void fence_barrier_init() {}

inline void expect_bytes(u64* barrier, u32 bytes) {
  if (!emulated(barrier).missing_arrivals) {
    std::fprintf(stderr, "block %u, thread %u: too many arrivals in a phase\n", blockIdx.x, threadIdx.x);
    std::exit(1);
  }
  emulated(barrier).missing_arrivals--;
  arrive(emulated(barrier), -(int)bytes);
}
inline void arrive(u64* barrier) { expect_bytes(barrier, 0); }

inline void wait_for_sends(u64* barrier, u32 parity) {
  while (emulated(barrier).phase == parity) yield();
  progress++;
}
inline void wait_for_loads(u64* barrier, u32 parity) { wait_for_sends(barrier, parity); }

template <typename Type>
Type* address_at_rank(Type* pointer, int rank) {
  const int block = blockIdx.x / ranks_per_cluster * ranks_per_cluster + rank;
  return (Type*)(blocks[block].shared + ((unsigned char*)pointer - blocks[blockIdx.x].shared));
}

inline void send(const void* to, int rank, const void* from, u32 bytes, const u64* barrier) {
  std::memcpy((void*)address_at_rank(to, rank), from, bytes);
  arrive(emulated(address_at_rank(barrier, rank)), bytes);
}
inline void send(const void* to, int rank, float4 x, const u64* barrier) { send(to, rank, &x, 16, barrier); }
inline void send(const void* to, int rank, uint2 x, const u64* barrier) { send(to, rank, &x, 8, barrier); }
inline void send(const void* to, int rank, uint4 x, const u64* barrier) { send(to, rank, &x, 16, barrier); }

inline void load_async(void* to, const void* from, u32 bytes, u64* barrier) {
  std::memcpy(to, from, bytes);
  arrive(emulated(barrier), bytes);
}
inline void load_once(void* to, const void* from, u32 bytes, u64* barrier) { load_async(to, from, bytes, barrier); }

inline void fence_before_store() {}
inline void store_async(void* to, const void* from, u32 bytes) { std::memcpy(to, from, bytes); }
inline void commit_stores() {}
inline void wait_until_read() {}
inline void wait_until_stored() {}

inline float4 load_global(const float* from) { return *(const float4*)from; }

inline void atomic_add(float* to, float4 x) {
  to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
}

inline void increment(u32* counter) { ++*counter, ++progress; }

inline void wait_for_count(const u32* counter, u32 target) {
  while (*counter < target) yield();
  progress++;
}

// Runs a kernel to its end; false if it never ends, because all threads wait for each other.

static void (*kernel)(void**);
static void** arguments;

inline void run_thread() {
  kernel(arguments);
  current->ended = true;
  progress++;
  yield();
}

inline bool run(void (*function)(void**), void** pointers, int count, int ranks, int block_threads, int memory) {
  kernel = function, arguments = pointers, threads_per_block = block_threads, ranks_per_cluster = ranks;
  blocks.clear(), threads.clear();
  clusters.assign(count / ranks, {});
  blocks.resize(count);
  threads.resize(count * block_threads);
  for (Block& block : blocks) {
    block.memory.reset(new unsigned char[memory + 128]);
    std::memset(block.memory.get(), 0xff, memory + 128);  // NaN: a GPU does not zero it either
    block.shared = (unsigned char*)(((size_t)block.memory.get() + 127) / 128 * 128);
    block.warps.resize(block_threads / 32);
  }
  const int stack_bytes = 32768;
  for (size_t i = 0; i < threads.size(); i++) {
    Thread& thread = threads[i];
    thread.stack.reset(new char[stack_bytes]);
    thread.block.x = i / block_threads, thread.thread.x = i % block_threads;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = stack_bytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  for (size_t left = threads.size(); left;) {
    const u64 before = progress;
    left = 0;
    for (Thread& thread : threads) {
      if (thread.ended) continue;
      current = &thread;
      swapcontext(&scheduler, &thread.context);
      left += !thread.ended;
    }
    if (left && progress == before) return false;
  }
  return true;
}
