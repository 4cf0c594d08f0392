// Which addresses a launch may touch: the elements of its views, exactly, so that the gaps of a strided view are outside.
// Included by cuda_host_memory.hpp only.
#pragma once
#include <algorithm>
#include <vector>

#include "cuda_host_runtime.hpp"

namespace cuda_host {

// Whose memory it is: 0 and up, the range of the launch; else one of these.
constexpr int kUnrecorded = -1, kSharedMemory = -2, kModuleVariable = -3;

struct Region {
  uintptr_t lo, hi;
  bool writable;
};

// Bytes without a gap, of one view.
struct Span {
  uintptr_t lo, hi;
  bool writable;
  int owner;
  bool holds(uintptr_t p, size_t size) const { return p >= lo && p <= hi - size && size <= hi - lo; }
};

// An array argument, a shared array or a variable of the module. Without dims all of [lo, hi) belongs to it.
struct View {
  uintptr_t lo, hi;
  bool writable;
  int owner;
  uint64_t run = 0, num_dims = 0;
  const Dimension* dims = nullptr;

  // The span that holds [p, p + size); of no bytes where none does.
  Span find(uintptr_t p, size_t size) const {
    uintptr_t base = lo, length = hi - lo;
    for (uint64_t i = 0; i < num_dims && p >= lo; ++i) {
      const uint64_t at = std::min<uint64_t>((p - base) / dims[i].stride, dims[i].count - 1);
      base += at * dims[i].stride;
      length = run;
    }
    const Span span = {base, base + length, writable, owner};
    return span.holds(p, size) ? span : Span{0, 0, false, kUnrecorded};
  }
};

// Views that overlap each other, at least in their gaps: views[first] up to, not including, views[last].
struct Cluster {
  uintptr_t lo, hi;
  size_t first, last;
};

class Views {
 public:
  void clear() { views_.clear(), clusters_.clear(); }
  void add(const View& view) {
    if (view.lo < view.hi) views_.push_back(view);
  }
  void sort() {
    std::sort(views_.begin(), views_.end(), [](const View& a, const View& b) { return a.lo < b.lo; });
    for (size_t i = 0; i < views_.size(); ++i) {
      const View& view = views_[i];
      if (!clusters_.empty() && view.lo < clusters_.back().hi)
        clusters_.back().hi = std::max(clusters_.back().hi, view.hi), clusters_.back().last = i + 1;
      else
        clusters_.push_back({view.lo, view.hi, i, i + 1});
    }
    for (const Cluster& c : clusters_)  // a byte of several arguments counts for the first of them
      std::sort(&views_[c.first], &views_[c.first] + (c.last - c.first),
                [](const View& a, const View& b) { return uint32_t(a.owner) < uint32_t(b.owner); });
  }

  // The first span of an argument that holds [p, p + size) and, for a store, may be written; `read_only` where one holds
  // it that may not. A span of no bytes when there is none.
  Span find(uintptr_t p, size_t size, bool store, bool& read_only) const {
    auto after = std::upper_bound(clusters_.begin(), clusters_.end(), p,
                                  [](uintptr_t address, const Cluster& c) { return address < c.lo; });
    if (after == clusters_.begin()) return {0, 0, false, kUnrecorded};
    const Cluster& cluster = *(after - 1);
    for (size_t i = cluster.first; i < cluster.last; ++i) {
      const Span span = views_[i].find(p, size);
      if (span.lo == span.hi) continue;
      if (!store || span.writable) return span;
      read_only = true;
    }
    return {0, 0, false, kUnrecorded};
  }

 private:
  std::vector<View> views_;        // sorted by lo, and in a cluster by owner
  std::vector<Cluster> clusters_;  // sorted, disjoint
};

}  // namespace cuda_host
