// Copy KV blocks inside many caches at once, as if every block were read before any is written.
//
// The same byte of every block forms a column, and columns do not touch each other: whatever the pairs (src, dst)
// are, it is enough that one thread moves its bytes of the pairs in an order in which each block is read before it is
// written. Whether the order matters is known before the launch, on the host that handed out the blocks:
//
// `copy_blocks`: it does not, since no source is a destination. Programs of their own for each pair, one for each slice
//   of each cache. Where a source has several destinations, those of its first pair find the others by reading the
//   pairs, and write all destinations from one read.
// `plan_block_copy`, then `copy_chained`: a block is written by one pair at most, so the pair that writes a pair's
//   source, its parent, is unique, and pairs that depend on each other form trees, or a cycle with trees hanging on it.
//   The plan finds parents and readers in O(pairs), cycles in log2(pairs) rounds. Every tree gets programs of its own,
//   which visit it with children first: a block goes to all its readers at once, when all these have been read. A
//   cycle is a tree from its lowest pair, whose source is loaded before everything else.
//
// Bytes moved: each source that moves once, every destination once; 16 bytes a pair, and of plan, from the L2 cache.
// Every thread has four 16-byte loads in flight before its first store; nothing waits for another thread.
//
// Code generation, NVRTC 13.2: see block_copy_cupy.py.
#include "intrinsics.cuh"

constexpr int WORDS_PER_THREAD = 4;
constexpr int MAX_THREADS = 256;  // of a program

enum Role { DEPENDENT = 0, ROOT = 1, CYCLE = 2 };

// What a program needs of a pair, one 16-byte load. -1 stands for none.
//   x: parent, y: first pair that reads what this one writes, z: next pair that reads the same source, w: Role
using Node = int4;

// One program. pairs [num_pairs, 2] with element strides; of_block int32 [num_blocks], touched only where a moving pair
// reads or writes: the pair that writes the block, or else -2 less the last one found to read it, -1 before;
// nodes int32 [num_pairs, 4]; rounds int32 [4, num_pairs].
__global__ void __launch_bounds__(256)
plan_block_copy(const long long* pairs, long long pair_stride, long long side_stride, int num_pairs,
                int* of_block, int* nodes, int* rounds) {
  const int first = threadIdx.x, step = blockDim.x;

  for (int i = first; i < num_pairs; i += step) {
    const long long src = pairs[i * pair_stride], dst = pairs[i * pair_stride + side_stride];
    if (src != dst) atomicExch(&of_block[src], -1);
    nodes[4 * i] = nodes[4 * i + 1] = nodes[4 * i + 2] = -1;
    nodes[4 * i + 3] = DEPENDENT;
  }
  __syncthreads();
  for (int i = first; i < num_pairs; i += step) {
    const long long src = pairs[i * pair_stride], dst = pairs[i * pair_stride + side_stride];
    if (src != dst) of_block[dst] = i;
  }
  __syncthreads();

  for (int i = first; i < num_pairs; i += step) {
    const long long src = pairs[i * pair_stride], dst = pairs[i * pair_stride + side_stride];
    const int parent = src == dst ? -1 : max(-1, atomicAdd(&of_block[src], 0));
    if (parent >= 0) {
      nodes[4 * i] = parent;
      nodes[4 * i + 2] = atomicExch(&nodes[4 * parent + 1], i);
    } else if (src != dst) {
      nodes[4 * i + 2] = max(-1, -2 - atomicExch(&of_block[src], -2 - i));
    }
    rounds[i] = parent;             // the ancestor 2^round up, here round 0
    rounds[2 * num_pairs + i] = i;  // the lowest pair from here to just below that ancestor
  }
  __syncthreads();
  for (int i = first; i < num_pairs; i += step) {
    const long long src = pairs[i * pair_stride], dst = pairs[i * pair_stride + side_stride];
    if (src != dst && of_block[src] == -2 - i) nodes[4 * i + 3] = ROOT;
  }

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
// as it takes; words of `word` bytes. Strides and offset in bytes. Mirrors Layout.fields in block_copy_cupy.py.
struct Layout {
  long long offset, block_stride, words, run_words, inner, inner_stride, outer_stride, word;
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

// The bytes of every block that a thread moves: of slice `slice` of a layout, in words of one size.
template <typename Word>
struct Column {
  char* cache;
  long long block_stride;
  long long at[WORDS_PER_THREAD];
  bool valid[WORDS_PER_THREAD];

  __device__ Column(const Layout& layout, long long address, int slice)
      : cache(reinterpret_cast<char*>(address)), block_stride(layout.block_stride) {
    const WordOffsets offsets(layout, sizeof(Word));
    const unsigned first = static_cast<unsigned>(slice) * WORDS_PER_THREAD * blockDim.x + threadIdx.x;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
      const unsigned word = first + i * blockDim.x;
      valid[i] = word < offsets.words;
      at[i] = valid[i] ? offsets(word) : 0;
    }
  }

  struct Held {
    Word words[WORDS_PER_THREAD];
  };
  __device__ Held words() const { return Held{}; }

  __device__ void load(long long block, Word (&held)[WORDS_PER_THREAD]) const {
    const char* from = cache + block * block_stride;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i)
      if (valid[i]) held[i] = load_word<Word>(from + at[i]);
  }

  __device__ void store(long long block, const Word (&held)[WORDS_PER_THREAD]) const {
    char* to = cache + block * block_stride;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i)
      if (valid[i]) store_word<Word>(to + at[i], held[i]);
  }
};

// Calls copy(Column<Word>) with the layout's word; kWord is its size where all layouts of a launch have one, else 0.
template <int kWord, typename Copy>
__device__ __forceinline__ void with_column(const Layout& layout, long long address, int slice, const Copy& copy) {
  const int word = kWord > 0 ? kWord : static_cast<int>(layout.word);
  if constexpr (kWord == 16 || kWord == 0)
    if (word == 16) return copy(Column<uint4>(layout, address, slice));
  if constexpr (kWord == 0) {
    if (word == 8)
      copy(Column<unsigned long long>(layout, address, slice));
    else if (word == 4)
      copy(Column<unsigned int>(layout, address, slice));
    else if (word == 2)
      copy(Column<unsigned short>(layout, address, slice));
    else
      copy(Column<unsigned char>(layout, address, slice));
  }
}

struct Pairs {
  const long long* ids;
  long long pair_stride, side_stride;

  __device__ long long src(int i) const { return ids[i * pair_stride]; }
  __device__ long long dst(int i) const { return ids[i * pair_stride + side_stride]; }
  __device__ bool moves(int i, long long from) const { return src(i) == from && dst(i) != from; }
};

// Program (x, y): pair x / slices, slice x % slices of the layouts y, y + gridDim.y and so on. addresses int64 [layouts];
// layouts as struct Layout.
template <int kWord, int kFansOut>
__global__ void copy_blocks(const long long* addresses, const Layout* layouts, const long long* ids,
                            long long pair_stride, long long side_stride, int num_pairs, int num_layouts, int slices) {
  const int pair = blockIdx.x / slices, slice = blockIdx.x % slices;
  const Pairs pairs{ids, pair_stride, side_stride};
  const long long src = pairs.src(pair), dst = pairs.dst(pair);
  if (src == dst) return;
  if constexpr (kFansOut) {
    int earlier = 0;
    for (int i = threadIdx.x; i < pair; i += blockDim.x) earlier |= pairs.moves(i, src);
    if (__syncthreads_or(earlier)) return;  // that one's programs move it to all its destinations
  }
  const auto copy_layout = [&](int y) {
    with_column<kWord>(layouts[y], addresses[y], slice, [&](const auto& column) {
      auto held = column.words();
      column.load(src, held.words);
      column.store(dst, held.words);
      if constexpr (kFansOut) {
        __shared__ long long others[MAX_THREADS];
        __shared__ int found;
        for (int start = pair + 1; start < num_pairs; start += blockDim.x) {
          const int mine = start + threadIdx.x;
          if (threadIdx.x == 0) found = 0;
          __syncthreads();
          if (mine < num_pairs && pairs.moves(mine, src)) others[atomicAdd(&found, 1)] = pairs.dst(mine);
          __syncthreads();
          for (int i = 0; i < found; ++i) column.store(others[i], held.words);
          __syncthreads();
        }
      }
    });
  };
  if constexpr (kFansOut) {
    for (int y = blockIdx.y; y < num_layouts; y += gridDim.y) copy_layout(y);
  } else {
    copy_layout(blockIdx.y);  // a loop of one round would cost registers
  }
}

// Program (x, y): the tree of pair x / slices, slice x % slices of layout y. nodes as plan_block_copy leaves them.
template <int kWord>
__global__ void copy_chained(const long long* addresses, const Layout* layouts, const long long* ids,
                             long long pair_stride, long long side_stride, const Node* nodes, int slices) {
  const int root = blockIdx.x / slices, slice = blockIdx.x % slices;
  const Node leader = nodes[root];
  const int role = leader.w;
  if (role == DEPENDENT) return;
  const Pairs pairs{ids, pair_stride, side_stride};
  const long long root_block = pairs.src(root);
  const int first_reader = role == CYCLE ? nodes[leader.x].y : root;
  with_column<kWord>(layouts[blockIdx.y], addresses[blockIdx.y], slice, [&](const auto& column) {
    auto held = column.words(), root_held = column.words();
    const auto store_to_readers = [&](int reader, const auto& held) {
      for (; reader >= 0; reader = nodes[reader].z) column.store(pairs.dst(reader), held.words);
    };
    if (role == CYCLE) column.load(root_block, root_held.words);

    // leader.x is the pair that writes the root's source, or -1: the parent of the root's first readers either way.
    int node = first_reader;
    bool entering = true;  // else all that the readers of its destination write has been read
    for (;;) {
      const Node links = nodes[node];
      if (entering && links.y >= 0 && node != leader.x) {
        node = links.y;
        continue;
      }
      if (!entering) {
        column.load(pairs.dst(node), held.words);
        store_to_readers(links.y, held);
      }
      entering = links.z >= 0;
      if (!entering && links.x == leader.x) break;
      node = entering ? links.z : links.x;
    }
    if (role != CYCLE) column.load(root_block, root_held.words);
    store_to_readers(first_reader, root_held);
  });
}
