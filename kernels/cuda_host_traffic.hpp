// What a launch does to each buffer: bytes, 32-byte sectors, and the requests of warps. Included by cuda_host_trace.hpp
// only.
//
// A request is what the lanes of a warp do at the k-th execution of one instruction since the warp last converged. It
// converges where all its live lanes meet: at a barrier, at a warp-wide operation, at the end. (Between those points the
// fibers of a warp run one after another, so which lanes a GPU would run together is not known; those that went the same
// way as often are taken to.) A byte that several lanes ask for in a request counts once. A block with more than
// kMostOpen requests between such points (a thread that spins) has them counted as they stand.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda_host_runtime.hpp"

namespace cuda_host {

class RequestCounter {
 public:
  void begin(const Launch& launch) {
    totals_ = launch.trace->traffic;
    touched_.clear();
    first_sector_.clear();
    for (uint64_t i = 0; i < launch.num_buffers; ++i) {
      const Range& r = launch.ranges[i];
      const size_t words = r.lo < r.hi ? ((r.hi - 1) / kSector - r.lo / kSector) / 64 + 1 : 1;
      first_sector_.push_back(r.lo / kSector);
      touched_.emplace_back(static_cast<uint64_t*>(calloc(words, 8)));  // fresh pages: untouched ones cost nothing
    }
    for (Warp& warp : warps_) warp.clear();
    open_ = 0;
  }

  void add(int thread, int site, int owner, Access access, uintptr_t p, size_t size) {
    Warp& warp = warps_[thread / 32];
    Site& s = warp.site(site);
    const size_t visit = s.visits[thread % 32]++;
    if (visit == 0 && s.requests.empty()) warp.active.push_back(site);
    if (visit >= s.requests.size()) {
      if (++open_ > kMostOpen) return count_open(thread, site, owner, access, p, size);
      s.requests.push_back({p, p + size, kNone, kNone, owner, access});
      return;
    }
    Request* request = &s.requests[visit];
    while (request->owner != owner) {  // lanes of one instruction in several buffers
      if (request->next == kNone) {
        warp.more.push_back({p, p + size, kNone, kNone, owner, access});
        request->next = static_cast<uint32_t>(warp.more.size() - 1);
        return;
      }
      request = &warp.more[request->next];
    }
    if (p >= request->lo && p <= request->hi) request->hi = std::max(request->hi, p + size);
    else if (p < request->lo && p + size >= request->lo) request->lo = p, request->hi = std::max(request->hi, p + size);
    else {
      warp.runs.push_back({request->lo, request->hi, request->runs});
      request->runs = static_cast<uint32_t>(warp.runs.size() - 1);
      request->lo = p, request->hi = p + size;
    }
  }

  void converge(int warp_index) {
    Warp& warp = warps_[warp_index];
    for (int site : warp.active) {
      Site& s = *warp.sites[site];
      for (const Request& first : s.requests)
        for (const Request* r = &first; r != nullptr; r = r->next == kNone ? nullptr : &warp.more[r->next]) count(warp, *r);
      open_ -= s.requests.size();
      s.requests.clear();
      memset(s.visits, 0, sizeof s.visits);
    }
    warp.active.clear(), warp.runs.clear(), warp.more.clear();
  }

 private:
  static constexpr uintptr_t kSector = 32;
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr size_t kMostOpen = 4 << 20;

  struct Request {  // [lo, hi) and the runs that do not touch it
    uintptr_t lo, hi;
    uint32_t runs, next;
    int owner;
    Access access;
  };
  struct Run {
    uintptr_t lo, hi;
    uint32_t next;
  };
  struct Site {  // one instruction
    uint32_t visits[32] = {};
    std::vector<Request> requests;
  };
  struct Warp {
    std::vector<std::unique_ptr<Site>> sites;
    std::vector<int> active;
    std::vector<Run> runs;
    std::vector<Request> more;
    Site& site(int i) {
      if (sites.size() <= size_t(i)) sites.resize(i + 1);
      if (!sites[i]) sites[i] = std::make_unique<Site>();
      return *sites[i];
    }
    void clear() { sites.clear(), active.clear(), runs.clear(), more.clear(); }
  };
  struct Free {
    void operator()(uint64_t* p) const { free(p); }
  };

  void count_open(int thread, int site, int owner, Access access, uintptr_t p, size_t size) {
    for (int w = 0; w < kMaxThreads / 32; ++w) converge(w);
    open_ = 0;
    add(thread, site, owner, access, p, size);
  }

  void count(const Warp& warp, const Request& r) {
    Traffic& total = totals_[r.owner];
    uint64_t bytes = 0, sectors = 0;
    if (r.runs == kNone) {
      bytes = r.hi - r.lo, sectors = (r.hi - 1) / kSector - r.lo / kSector + 1;
      total.sectors += touch(r.owner, r.lo / kSector, (r.hi - 1) / kSector);
    } else {
      sorted_.assign(1, {r.lo, r.hi, 0});
      for (uint32_t i = r.runs; i != kNone; i = warp.runs[i].next) sorted_.push_back(warp.runs[i]);
      std::sort(sorted_.begin(), sorted_.end(), [](const Run& a, const Run& b) { return a.lo < b.lo; });
      uintptr_t end = 0, next_sector = 0;
      for (const Run& run : sorted_) {
        if (run.hi > end) bytes += run.hi - std::max(run.lo, end), end = run.hi;
        const uintptr_t first = std::max(run.lo / kSector, next_sector), last = (run.hi - 1) / kSector;
        if (last < first) continue;
        sectors += last - first + 1, next_sector = last + 1;
        total.sectors += touch(r.owner, first, last);
      }
    }
    (r.access == kLoad ? total.loaded : r.access == kStore ? total.stored : total.atomic) += bytes;
    total.requests += 1;
    total.sectors_requested += sectors;
  }

  // How many of these sectors of a buffer were untouched.
  uint64_t touch(int owner, uintptr_t first, uintptr_t last) {
    uint64_t* bits = touched_[owner].get();
    if (bits == nullptr) return 0;  // no address space for them
    uint64_t fresh = 0;
    for (uintptr_t i = first - first_sector_[owner]; i <= last - first_sector_[owner]; ++i) {
      const uint64_t bit = 1ull << (i % 64);
      fresh += (bits[i / 64] & bit) == 0;
      bits[i / 64] |= bit;
    }
    return fresh;
  }

  Traffic* totals_ = nullptr;
  size_t open_ = 0;
  std::vector<std::unique_ptr<uint64_t, Free>> touched_;  // a bit for each sector of a buffer
  std::vector<uintptr_t> first_sector_;
  Warp warps_[kMaxThreads / 32];
  std::vector<Run> sorted_;
};

}  // namespace cuda_host
