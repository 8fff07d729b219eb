// hopper.cuh's functions for a CPU: each of a GPU's threads is a coroutine, which gives way wherever it has to wait.
// It shows whether a kernel computes the right thing and comes to an end; nothing of when one thread sees what
// another has written.

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

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline u32 __float_as_uint(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
inline float from_bits(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }

struct Index { u32 x; };

struct Meeting {  // of a known number of threads
  int missing = 0;
  long times = 0;
};

struct Warp {
  Meeting meeting;
  u32 given[2][32][6];  // of this exchange, and of the one before
};

struct Block {
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared;  // aligned
  Meeting meeting;
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
static std::vector<Meeting> clusters;
static std::vector<Thread> threads;
static Thread* current;
static ucontext_t scheduler;
static u64 progress = 0;
static int threads_of_block, ranks_of_cluster;

#define blockIdx (current->block)
#define threadIdx (current->thread)
#define KERNEL(ranks, threads) void
#define SHARED(Type, name) Type& name = *(Type*)blocks[blockIdx.x].shared

inline void give_way() { swapcontext(&current->context, &scheduler); }

inline void meet(Meeting& meeting, int count) {
  const long times = meeting.times;
  progress++;
  if (!meeting.missing) meeting.missing = count;
  if (!--meeting.missing) meeting.times++;
  while (meeting.times == times) give_way();
}

inline void __syncwarp() { meet(blocks[blockIdx.x].warps[threadIdx.x / 32].meeting, 32); }
inline void __syncthreads() { meet(blocks[blockIdx.x].meeting, threads_of_block); }
inline void meet_cluster() { meet(clusters[blockIdx.x / ranks_of_cluster], threads_of_block * ranks_of_cluster); }

// What all threads of a warp give each other.
template <int COUNT>
u32 (*exchange(const u32 (&given)[COUNT]))[6] {
  Warp& warp = blocks[blockIdx.x].warps[threadIdx.x / 32];
  auto& place = warp.given[current->exchanges++ % 2];
  std::memcpy(place[threadIdx.x % 32], given, sizeof(given));
  meet(warp.meeting, 32);
  return place;
}

inline u32 __shfl_xor_sync(u32, u32 x, int lanes) { return exchange<1>({x})[(threadIdx.x ^ lanes) % 32][0]; }
inline float __shfl_xor_sync(u32 all, float x, int lanes) {
  return from_bits(__shfl_xor_sync(all, __float_as_uint(x), lanes));
}

inline float bfloat(u32 both, int which) { return from_bits(which ? both & 0xffff0000u : both << 16); }

inline u32 rounded(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline u32 bfloats(float low, float high) { return rounded(high) << 16 | rounded(low); }

inline void multiply(float (&sum)[4], uint4 texts, u32 low, u32 high) {
  const auto given = exchange<6>({texts.x, texts.y, texts.z, texts.w, low, high});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const int text = lane / 4 + i / 2 * 8, row = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const u32* of_text = given[text % 8 * 4 + k % 8 / 2];
      const u32* of_row = given[row * 4 + k % 8 / 2];
      sum[i] += bfloat(of_text[text / 8 + k / 8 * 2], k % 2) * bfloat(of_row[4 + k / 8], k % 2);
    }
  }
}

// A barrier: which phase it is in, whether someone still has to expect something, and bytes that have not come.
struct Barrier {
  int bytes : 30;
  unsigned waits : 1, phase : 1;
  int unused;
};
static_assert(sizeof(Barrier) == sizeof(u64), "");

inline Barrier& barrier(const u64* arrived) { return *(Barrier*)arrived; }

inline void come(Barrier& barrier, int bytes) {
  progress++;
  barrier.bytes -= bytes;
  if (!barrier.waits && !barrier.bytes) {
    barrier.phase ^= 1;
    barrier.waits = 1;
  }
}

inline void begin(u64* arrived) { barrier(arrived) = {0, 1, 0, 0}; }
inline void all_have_begun() {}

inline void expect(u64* arrived, u32 bytes) {
  if (!barrier(arrived).waits) {
    std::fprintf(stderr, "block %u, thread %u expects twice\n", blockIdx.x, threadIdx.x);
    std::exit(1);
  }
  barrier(arrived).waits = 0;
  come(barrier(arrived), -(int)bytes);
}

inline void wait_for_sent(u64* arrived, u32 parity) {
  while (barrier(arrived).phase == parity) give_way();
  progress++;
}
inline void wait_for_fetched(u64* arrived, u32 parity) { wait_for_sent(arrived, parity); }

template <typename Place>
Place* at(Place* here, int rank) {
  const int there = blockIdx.x / ranks_of_cluster * ranks_of_cluster + rank;
  return (Place*)(blocks[there].shared + ((unsigned char*)here - blocks[blockIdx.x].shared));
}

inline void send(const void* place, int rank, const void* from, u32 bytes, const u64* arrived) {
  std::memcpy((void*)at(place, rank), from, bytes);
  come(barrier(at(arrived, rank)), bytes);
}
inline void send(const void* place, int rank, float4 x, const u64* arrived) { send(place, rank, &x, 16, arrived); }
inline void send(const void* place, int rank, uint2 x, const u64* arrived) { send(place, rank, &x, 8, arrived); }
inline void send(const void* place, int rank, uint4 x, const u64* arrived) { send(place, rank, &x, 16, arrived); }

inline void fetch(void* place, const void* from, u32 bytes, u64* arrived) {
  std::memcpy(place, from, bytes);
  come(barrier(arrived), bytes);
}

inline void is_written() {}
inline void store(void* to, const void* from, u32 bytes) { std::memcpy(to, from, bytes); }
inline void all_is_asked_for() {}
inline void wait_until_read() {}
inline void wait_until_stored() {}

inline float4 read(const float* from) { return *(const float4*)from; }

inline void add_to(float* place, float4 x) {
  place[0] += x.x, place[1] += x.y, place[2] += x.z, place[3] += x.w;
}

inline void count(u32* counter) { ++*counter, ++progress; }

inline void wait_for_count(const u32* counter, u32 enough) {
  while (*counter < enough) give_way();
  progress++;
}

// Runs a kernel to its end; false if it never comes to one.

static void (*kernel)(void**);
static void** arguments;

inline void run_thread() {
  kernel(arguments);
  current->ended = true;
  progress++;
  give_way();
}

inline bool run(void (*given)(void**), void** with, int count, int ranks, int each, int memory) {
  kernel = given, arguments = with, threads_of_block = each, ranks_of_cluster = ranks;
  blocks.clear(), threads.clear();
  clusters.assign(count / ranks, {});
  blocks.resize(count);
  threads.resize(count * each);
  for (Block& block : blocks) {
    block.memory.reset(new unsigned char[memory + 128]);
    std::memset(block.memory.get(), 0x7f, memory + 128);  // not zero: nobody may count on that
    block.shared = (unsigned char*)(((size_t)block.memory.get() + 127) / 128 * 128);
    block.warps.resize(each / 32);
  }
  const int stack = 32768;
  for (size_t i = 0; i < threads.size(); i++) {
    Thread& thread = threads[i];
    thread.stack.reset(new char[stack]);
    thread.block.x = i / each, thread.thread.x = i % each;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = stack;
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
    if (left && progress == before) return false;  // all wait for each other
  }
  return true;
}
