// Who touched which bytes: what the race checks remember of each. Included by cuda_host_trace.hpp only.
#pragma once
#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

#include "cuda_host_runtime.hpp"

namespace cuda_host {

// An access as the bytes it touched remember it, packed into 8 bytes; 0 is none. Epochs count barriers and blocks through
// the launch, from 1; clocks the __syncwarps of a lane within a block, up to kLastClock, from which on all are ordered.
struct Note {
  uint64_t epoch : 28, clock : 13, thread : 10, site : 13;
};
constexpr int kLastClock = (1 << 13) - 1, kMaxSites = 1 << 13, kMaxEpochs = 1 << 28;

// What was noted of a byte, or of some that were only ever touched together. Two readers, and two that changed it
// atomically, are enough: any other thread that comes differs from one of them.
struct Owners {
  Note store, reads[2], atomics[2];
  uint32_t in_flight;  // thread + 1 of a cp.async
};

// The owners of 4 KiB. A granule is the largest power of two, up to 16, that every access so far was whole multiples of.
struct Page {
  uintptr_t base;
  int shift = 4;
  std::vector<Owners> owners = std::vector<Owners>(kBytes >> 4);
  static constexpr uintptr_t kBytes = 4096;

  void refine(int to) {
    std::vector<Owners> finer(kBytes >> to);
    for (size_t i = 0; i < finer.size(); ++i) finer[i] = owners[i >> (shift - to)];
    owners.swap(finer);
    shift = to;
  }
};

class Pages {
 public:
  void clear() {
    pages_.clear();
    for (Page*& page : recent_) page = nullptr;
  }

  // visit(owners, address) for each granule of [p, p + size).
  template <class Visit>
  void each(uintptr_t p, size_t size, Visit visit) {
    while (size > 0) {
      Page& page = page_of(p);
      const size_t here = std::min<size_t>(size, page.base + Page::kBytes - p);
      if (((p | here) & ((1u << page.shift) - 1)) != 0) page.refine(__builtin_ctzll(p | here));
      for (uintptr_t at = p; at < p + here; at += 1u << page.shift) visit(page.owners[(at - page.base) >> page.shift], at);
      p += here, size -= here;
    }
  }

 private:
  static constexpr size_t kNumRecent = 64;

  Page& page_of(uintptr_t p) {
    const uintptr_t base = p / Page::kBytes * Page::kBytes;
    Page*& recent = recent_[p / Page::kBytes % kNumRecent];
    if (recent != nullptr && recent->base == base) return *recent;
    std::unique_ptr<Page>& page = pages_[base];
    if (!page) page = std::make_unique<Page>(), page->base = base;
    return *(recent = page.get());
  }

  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  Page* recent_[kNumRecent] = {};
};

}  // namespace cuda_host
