// Copy KV blocks inside many caches at once, as if every block were read before any is written.
//
// The same byte of every block forms a column, and columns do not touch each other: whatever the pairs (src, dst)
// are, it is enough that one thread moves its bytes of the pairs in an order in which each block is read before it is
// written. A block is written by one pair at most, so the pair that writes a pair's source, its parent, is unique,
// and pairs that depend on each other form a tree, or a cycle with trees hanging on it. `plan_block_copy` finds the
// parents, in O(pairs) and in log2(pairs) rounds where there are cycles. `copy_blocks` gives every tree to programs
// of its own, one for each slice of each cache: they visit the tree with children first. A cycle is a tree from its
// lowest pair, whose source is loaded before everything else. Pairs that depend on no other pair are trees of one.
//
// Bytes moved: a source for each of its destinations, every destination once, and 16 bytes of plan per pair and program
// from the L2 cache.
// Every thread has four 16-byte loads in flight before its first store; nothing waits for another thread.
//
// Code generation, NVRTC 13.2: see block_copy_cupy.py.
#include "intrinsics.cuh"

constexpr int WORDS_PER_THREAD = 4;

enum Role { DEPENDENT = 0, ROOT = 1, CYCLE = 2 };

// What a program needs of a pair, one 16-byte load. -1 stands for none.
//   x: parent, y: first child, z: next child of the same parent, w: Role
using Node = int4;

// One program. pairs [num_pairs, 2] with element strides; pair_of_block int32 [num_blocks], touched only where a moving
// pair reads or writes; nodes int32 [num_pairs, 4]; rounds int32 [4, num_pairs].
__global__ void __launch_bounds__(256)
plan_block_copy(const long long* pairs, long long pair_stride, long long side_stride, int num_pairs,
                int* pair_of_block, int* nodes, int* rounds) {
  const int first = threadIdx.x, step = blockDim.x;

  for (int i = first; i < num_pairs; i += step) {
    const long long src = pairs[i * pair_stride], dst = pairs[i * pair_stride + side_stride];
    if (src != dst) atomicExch(&pair_of_block[src], -1);
    nodes[4 * i] = nodes[4 * i + 1] = nodes[4 * i + 2] = -1;
    nodes[4 * i + 3] = DEPENDENT;
  }
  __syncthreads();
  for (int i = first; i < num_pairs; i += step) {
    const long long src = pairs[i * pair_stride], dst = pairs[i * pair_stride + side_stride];
    if (src != dst) pair_of_block[dst] = i;
  }
  __syncthreads();

  int dependent = 0;
  for (int i = first; i < num_pairs; i += step) {
    const long long src = pairs[i * pair_stride], dst = pairs[i * pair_stride + side_stride];
    const int parent = src == dst ? -1 : pair_of_block[src];
    nodes[4 * i] = parent;
    if (parent >= 0) {
      nodes[4 * i + 2] = atomicExch(&nodes[4 * parent + 1], i);
      dependent = 1;
    } else if (src != dst) {
      nodes[4 * i + 3] = ROOT;
    }
    rounds[i] = parent;             // the ancestor 2^round up, here round 0
    rounds[2 * num_pairs + i] = i;  // the lowest pair from here to just below that ancestor
  }
  if (!__syncthreads_or(dependent)) return;

  // Pointer doubling. A pair that still has an ancestor after climbing num_pairs steps leads into a cycle.
  int now = 0, climbing = 1;
  for (long long climbed = 1; climbing && climbed < num_pairs; climbed *= 2) {
    const int *above = rounds + now * num_pairs, *lowest = rounds + (2 + now) * num_pairs;
    now ^= 1;
    int *next_above = rounds + now * num_pairs, *next_lowest = rounds + (2 + now) * num_pairs;
    int unfinished = 0;
    for (int i = first; i < num_pairs; i += step) {
      const int up = above[i];
      next_above[i] = up < 0 ? -1 : above[up];
      next_lowest[i] = up < 0 ? lowest[i] : min(lowest[i], lowest[up]);
      unfinished |= next_above[i] >= 0;
    }
    climbing = __syncthreads_or(unfinished);
  }
  // The far ancestors are exactly the pairs on cycles; one on its cycle's lowest index leads it.
  const int *above = rounds + now * num_pairs, *lowest = rounds + (2 + now) * num_pairs;
  for (int i = first; i < num_pairs; i += step) {
    const int far = above[i];
    if (far >= 0 && lowest[far] == far) atomicExch(&nodes[4 * far + 3], CYCLE);
  }
}

// A range of bytes in every block of a cache, as it lies in memory: `words` in runs of `run_words`, `inner` runs by as many
// as it takes. Strides and offset in bytes. Mirrors Layout.fields in block_copy_cupy.py.
struct Layout {
  long long offset, block_stride, words, run_words, inner, inner_stride, outer_stride;
};

// Offset of each word; what a layout of a single run does not need is not loaded.
struct WordOffsets {
  long long offset, inner_stride, outer_stride;
  unsigned words, run, inner;
  int word_bytes;

  __device__ WordOffsets(const Layout& layout, int word_bytes)
      : offset(layout.offset), inner_stride(0), outer_stride(0), words(layout.words), run(layout.run_words), inner(1),
        word_bytes(word_bytes) {
    if (run == words) return;
    inner = layout.inner, inner_stride = layout.inner_stride, outer_stride = layout.outer_stride;
  }

  __device__ long long operator()(unsigned word) const {
    const unsigned which = word / run;
    return offset + static_cast<long long>(word - which * run) * word_bytes +
           static_cast<long long>(which % inner) * inner_stride + static_cast<long long>(which / inner) * outer_stride;
  }
};

__device__ int next_but(int node, int root, const Node* nodes) {
  while (node == root) node = nodes[node].z;
  return node;
}

template <typename Word>
__device__ Word load_word(const char* from) {
  return *reinterpret_cast<const Word*>(from);
}
template <>
__device__ uint4 load_word<uint4>(const char* from) {
  return pb::load16(from);
}

template <typename Word>
__device__ void store_word(char* to, Word word) {
  *reinterpret_cast<Word*>(to) = word;
}
template <>
__device__ void store_word<uint4>(char* to, uint4 word) {
  pb::store16(to, word);
}

// Program (x, y): tree x / slices, slice x % slices of layout y. addresses int64 [layouts]; layouts int64 [layouts, 7].
template <typename Word>
__global__ void copy_blocks(const long long* addresses, const Layout* layouts, const long long* pairs,
                            long long pair_stride, long long side_stride, const Node* nodes, int slices) {
  const int root = blockIdx.x / slices, slice = blockIdx.x % slices;
  Node links = nodes[root];
  const int role = links.w;
  if (role == DEPENDENT) return;

  const long long block_stride = layouts[blockIdx.y].block_stride;
  const WordOffsets offsets(layouts[blockIdx.y], sizeof(Word));
  char* cache = reinterpret_cast<char*>(addresses[blockIdx.y]);
  const unsigned first = static_cast<unsigned>(slice) * WORDS_PER_THREAD * blockDim.x + threadIdx.x;
  long long at[WORDS_PER_THREAD];
  bool valid[WORDS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < WORDS_PER_THREAD; ++i) {
    const unsigned word = first + i * blockDim.x;
    valid[i] = word < offsets.words;
    at[i] = valid[i] ? offsets(word) : 0;
  }

  const auto load = [&](long long block, Word(&held)[WORDS_PER_THREAD]) {
    const char* from = cache + block * block_stride;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i)
      if (valid[i]) held[i] = load_word<Word>(from + at[i]);
  };
  const auto store = [&](long long block, const Word(&held)[WORDS_PER_THREAD]) {
    char* to = cache + block * block_stride;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i)
      if (valid[i]) store_word<Word>(to + at[i], held[i]);
  };

  Word first_source[WORDS_PER_THREAD];
  if (role == CYCLE) load(pairs[root * pair_stride], first_source);

  int node = root;
  bool entering = true;  // else all the children of `node` are done
  for (;;) {
    const int child = entering ? next_but(links.y, root, nodes) : -1;
    if (child >= 0) {
      node = child, links = nodes[node];
      continue;
    }
    const long long* pair = pairs + node * pair_stride;
    if (node == root && role == CYCLE) {
      store(pair[side_stride], first_source);
    } else {
      Word held[WORDS_PER_THREAD];
      load(pair[0], held);
      store(pair[side_stride], held);
    }
    if (node == root) return;
    const int sibling = next_but(links.z, root, nodes);
    entering = sibling >= 0;
    node = entering ? sibling : links.x;
    links = nodes[node];
  }
}
