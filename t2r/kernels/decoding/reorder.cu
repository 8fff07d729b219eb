// Beam search: each sequence takes the state of its parent, which is a sequence of the same sentence, in place.
//
// A thread has one word of all beams of a sentence. It reads them all before it writes any, and no other thread has them.
// reorder.py defines the macros: the names in capitals. Blocks are dealt to the arrays; those of one share its words.

template <typename Word>
void reorder_array(const int* parents, Word* array, u32 words) {  // `words` of each sequence
  for (u32 item = blockIdx.x / ARRAYS * THREADS + threadIdx.x; item < SENTENCES * words; item += BLOCKS * THREADS) {
    const u32 first = item / words * BEAMS, word = item % words;
    Word values[BEAMS];
#pragma unroll
    for (int beam = 0; beam < BEAMS; beam++) values[beam] = array[(u64)parents[first + beam] * words + word];
#pragma unroll
    for (int beam = 0; beam < BEAMS; beam++) array[(u64)(first + beam) * words + word] = values[beam];
  }
}

KERNEL(1, THREADS) reorder(PARAMETERS) {
  switch (blockIdx.x % ARRAYS) { CASES }
}
