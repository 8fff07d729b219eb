// What one_kernel.cu asks of a GPU: NVIDIA, compute capability 9.0 and later. One function for each instruction or two.

typedef unsigned u32;
typedef unsigned long long u64;

#define KERNEL(ranks, threads) extern "C" __global__ void __cluster_dims__(ranks, 1, 1) __launch_bounds__(threads, 1)
#define SHARED(Type, name)                                   \
  extern __shared__ __align__(128) unsigned char memory_[];  \
  Type& name = *(Type*)memory_

u32 address(const void* here) { return (u32)__cvta_generic_to_shared(here); }

u32 at(const void* here, int rank) {  // the same place in another block's memory
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(here)), "r"(rank));
  return there;
}

void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Barriers that count bytes. They turn to their next phase when all that was expected has arrived.

void begin(u64* arrived) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(arrived)) : "memory");
}

void all_have_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

void expect(u64* arrived, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(arrived)), "r"(bytes) : "memory");
}

#define WAIT(scope)                                                                                            \
  asm volatile("{\n.reg .pred there;\nagain:\nmbarrier.try_wait.parity.acquire." scope                        \
               ".shared::cta.b64 there, [%0], %1;\n@!there bra again;\n}" ::"r"(address(arrived)), "r"(parity) \
               : "memory")

void wait_for_sent(u64* arrived, u32 parity) { WAIT("cluster"); }
void wait_for_fetched(u64* arrived, u32 parity) { WAIT("cta"); }

// What goes to another block's memory, or comes from the GPU's, while threads do something else.

void send(const void* place, int rank, float4 x, const u64* arrived) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(at(place, rank)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(at(arrived, rank)) : "memory");
}

void send(const void* place, int rank, uint2 x, const u64* arrived) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
               ::"r"(at(place, rank)), "r"(x.x), "r"(x.y), "r"(at(arrived, rank)) : "memory");
}

void send(const void* place, int rank, uint4 x, const u64* arrived) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(at(place, rank)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(at(arrived, rank)) : "memory");
}

void fetch(void* place, const void* from, u32 bytes, u64* arrived) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(address(place)), "l"(from), "r"(bytes), "r"(address(arrived)) : "memory");
}

// And what goes to the GPU's memory. Threads that have written it say so; then one stores it, and waits.

void is_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

void store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(address(from)), "r"(bytes) : "memory");
}

void all_is_asked_for() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// What all blocks read and write.

float4 read(const float* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
  return x;
}

void add_to(float* place, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(place), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

void count(u32* counter) {  // after all that this block has written
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

void wait_for_count(const u32* counter, u32 enough) {
  u32 there = 0;
  for (u32 tries = 0; there < enough; tries++) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
    if (tries > 1u << 24) __trap();  // some blocks never came: they have no place on this GPU
  }
}

// Tensor cores.

u32 bfloats(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

void multiply(float (&sum)[4], uint4 texts, u32 low, u32 high) {  // adds 16 texts · 8 rows, of 16 columns
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(texts.x), "r"(texts.y), "r"(texts.z), "r"(texts.w), "r"(low), "r"(high));
}
