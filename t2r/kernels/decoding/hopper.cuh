// The GPU instructions that one_kernel.cu and all_layers.cu use, one or two to a function: NVIDIA, compute capability
// 9.0 and later.

typedef unsigned u32;
typedef unsigned long long u64;

#define KERNEL(ranks, threads) extern "C" __global__ void __cluster_dims__(ranks, 1, 1) __launch_bounds__(threads, 1)
#define SHARED(Type, name)                                   \
  extern __shared__ __align__(128) unsigned char memory_[];  \
  Type& name = *(Type*)memory_

u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

u32 address_at_rank(const void* pointer, int rank) {  // the same offset in the shared memory of another block
  u32 result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(pointer)), "r"(rank));
  return result;
}

void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier of the first COUNT threads, or of as many in whole warps, that call it.
template <int ID, int COUNT>
void sync_threads() {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// A number that is the same in all threads of a warp, which the compiler does not know.
int same_in_warp(int x) { return __shfl_sync(~0u, x, 0); }

// The same number, which the compiler does not know. What depends on it is computed there, and not once and for all, to
// be kept in registers.
u32 recomputed(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

u32 read_clock() {
  u32 cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

void pause(u32 cycles) {
  for (const u32 begin = read_clock(); read_clock() - begin < cycles;) {}
}

// Barriers in shared memory that count bytes (mbarrier). A phase ends when all bytes expected in it have arrived.

void init_barrier(u64* barrier, u32 arrivals = 1) {  // of `expect_bytes` or `arrive`, in each phase
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

void expect_bytes(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

#define WAIT(scope)                                                                                                \
  asm volatile("{\n.reg .pred done;\nretry:\nmbarrier.try_wait.parity.acquire." scope                             \
               ".shared::cta.b64 done, [%0], %1;\n@!done bra retry;\n}" ::"r"(shared_address(barrier)), "r"(parity) \
               : "memory")

void wait_for_sends(u64* barrier, u32 parity) { WAIT("cluster"); }  // of other blocks
void wait_for_loads(u64* barrier, u32 parity) { WAIT("cta"); }      // from global memory

// Asynchronous copies: to another block's shared memory (send), and from global memory (load). They report their bytes
// to a barrier of the receiving block.

void send(const void* to, int rank, float4 x, const u64* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(address_at_rank(to, rank)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w),
               "r"(address_at_rank(barrier, rank)) : "memory");
}

void send(const void* to, int rank, uint2 x, const u64* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
               ::"r"(address_at_rank(to, rank)), "r"(x.x), "r"(x.y), "r"(address_at_rank(barrier, rank)) : "memory");
}

void send(const void* to, int rank, uint4 x, const u64* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(address_at_rank(to, rank)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w),
               "r"(address_at_rank(barrier, rank)) : "memory");
}

void load_async(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// The same for what is read once in a step: it leaves the L2 cache first, so that what blocks exchange there stays.
void load_once(void* to, const void* from, u32 bytes, u64* barrier) {
  constexpr u64 EVICT_FIRST = 0x12F0000000000000;  // what createpolicy.fractional.L2::evict_first gives
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
               : "memory");
}

// Asynchronous stores to global memory. Threads that have written the data call the fence; then one thread stores it,
// commits, and waits until the data has been read, or until it has been stored.

void fence_before_store() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

void store_async(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Global memory that all blocks read and write.

float4 load_global(const float* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
  return x;
}

void atomic_add(float* to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

void increment(u32* counter) {  // after all that this block has written
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

void wait_for_count(const u32* counter, u32 target) {
  u32 value = 0;
  for (u32 tries = 0; value < target; tries++) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    if (tries > 1u << 24) __trap();  // some blocks never arrive: this GPU does not run all of them at once
  }
}

// Tensor cores.

u32 to_bfloats(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

u32 to_halves(float low, float high) {  // float16; what is larger becomes 65,504
  u32 both;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

u32 subtract_halves(u32 x, u32 y) {  // two of each
  u32 both;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
  return both;
}

// Four of the bytes of x (0 to 3) and y (4 to 7): their numbers are the digits of `bytes`, the lowest first.
u32 permute(u32 x, u32 y, u32 bytes) { return __byte_perm(x, y, bytes); }

// sum += x · weightsᵀ for 16 sequences, 8 outputs and 16 inputs; inputs 0 to 7 are in `low`, 8 to 15 in `high`.
#define MULTIPLY_ADD(type)                                                                                            \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
      "{%0, %1, %2, %3};"                                                                                             \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                        \
      : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(low), "r"(high))

void multiply_add(float (&sum)[4], uint4 x, u32 low, u32 high) { MULTIPLY_ADD("bf16"); }
void multiply_add_halves(float (&sum)[4], uint4 x, u32 low, u32 high) { MULTIPLY_ADD("f16"); }
