// The trace of a launch: races, reads of what nobody wrote, and traffic. Included by cuda_host_scheduler.hpp only.
//
// Two accesses of one byte are a race when they come from different threads, one of them writes, not both are atomic,
// and nothing orders them. What orders them, and nothing else does:
//   between blocks   nothing
//   within a block   a barrier (__syncthreads and its kin)
//   within a warp    __syncwarp, for the lanes of its mask, and through them what those were ordered after. Shuffles,
//                    votes, mma and ldmatrix order no memory (CUDA's programming guide), so they do not here.
// A cp.async writes shared memory from its issue until its thread waits for it: any access before then is a race, the
// thread's own too; after the wait it is a store of that thread. Fences and atomics order nothing: data handed over by a
// flag is reported. Races within a block are looked for in global memory too. Each thread's own memory is not recorded.
//
// g++ leaves out the check of a store that follows a load of the same address (`x[i] += 1`): such stores are found at the
// thread's next synchronisation, at the latest, by the bytes that changed since the load; one that stores the value
// that was there is not seen.
#pragma once
#include <csignal>

#include "cuda_host_memory.hpp"
#include "cuda_host_owners.hpp"
#include "cuda_host_traffic.hpp"

namespace cuda_host {

// Set while the recorder may be within malloc: the time limit, a signal, then waits, lest it leave malloc's lock taken.
static volatile sig_atomic_t unstoppable;

struct Unstoppable {
  const sig_atomic_t before = unstoppable;
  Unstoppable() { unstoppable = 1; }
  ~Unstoppable() { unstoppable = before; }
};

class LaunchRecorder {
 public:
  uint32_t thread = 0;  // the one that runs

  void begin(const Launch& launch) {
    traced_ = &launch, trace_ = launch.trace;
    exchanging = false;
    races_ = trace_->races != 0, uninitialised_ = trace_->uninitialised != 0;
    epoch_ = block_epoch_ = 0;
    unwritten_.kind = kNone;
    block_epochs_.clear(), block_numbers_.clear(), pages_.clear();
    sites_.assign(1, nullptr);
    if (site_of_.empty()) site_of_.resize(memory.module_hi - memory.module_lo);
    for (const void* pc : noted_) site_of_[offset(pc)] = 0;
    noted_.clear(), loads_.clear(), writes_.clear();
    fresh_of_.clear();
    for (uint64_t i = 0; i < launch.num_buffers; ++i) fresh_of_.push_back(find_fresh(launch.ranges[i]));
    if (trace_->traffic != nullptr) requests_.begin(launch);
  }

  void begin_block(uint64_t number, int threads) {
    const Unstoppable section;
    block_epoch_ = next_epoch();
    block_epochs_.push_back(block_epoch_);
    block_numbers_.push_back(number);
    memset(clocks_, 0, sizeof(clocks_[0]) * threads);
    memset(seen_, 0, sizeof(seen_[0]) * threads);
  }

  // A read of unwritten shared memory before here that no race explains; it stands before what may have come of it.
  void report_unwritten() {
    if (unwritten_.kind == kNone || fault.kind == kRace) return;
    fault = unwritten_;
    describe_object(fault.address);
  }

  void barrier(int warps) {
    const Unstoppable section;
    report_unwritten();
    next_epoch();
    for (int w = 0; w < warps; ++w) converge(w);
  }

  void converge(int warp) {
    const Unstoppable section;
    if (trace_->traffic != nullptr) requests_.converge(warp);
  }

  // __syncwarp: all of the mask know what each of them knew, and what each has done.
  void sync_warp(int warp, uint32_t mask) {
    uint16_t joined[32] = {};
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest), t = warp * 32 + lane;
      for (int other = 0; other < 32; ++other) joined[other] = std::max(joined[other], seen_[t][other]);
      if (clocks_[t] < kLastClock) ++clocks_[t];
      joined[lane] = clocks_[t];
    }
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1)
      memcpy(seen_[warp * 32 + __builtin_ctz(rest)], joined, sizeof joined);
  }

  void access(uintptr_t p, size_t size, Access access, const void* pc, const Span& span) {
    const Unstoppable section;
    const int site = site_number(pc);
    check_and_note(p, size, access, pc, site, span.owner);
    if (access == kLoad) {
      note_load(p, size, pc, span);
    } else {
      note_write(p, size);
    }
  }

  // Bytes that changed since this thread loaded them, by stores that g++ does not report.
  void find_unreported_stores() {
    const Unstoppable section;
    for (const Load& load : loads_) {
      if (memcmp(load.value, reinterpret_cast<const void*>(load.p), load.size) == 0 || written(load.p, load.size)) continue;
      if (!load.writable) fail(kReadOnly, load.p, load.size, kStore, load.pc);
      const auto* store_pc = static_cast<const char*>(load.pc) - 1;  // within the call: no other access has this address
      check_and_note(load.p, load.size, kStore, store_pc, site_number(store_pc), load.owner);
    }
    loads_.clear(), writes_.clear();
  }

  // The newest store was the issue of a cp.async, which lands later.
  const void* copy_issued(uintptr_t shared) {
    const Unstoppable section;
    if (races_) pages_.each(shared, 16, [&](Owners& o, uintptr_t) { o.in_flight = thread + 1; });
    return sites_[last_site_];
  }

  void copy_landed(uintptr_t shared, const void* pc) {
    const Unstoppable section;
    if (!races_ && !uninitialised_) return;
    const Note note = now(site_number(pc));
    pages_.each(shared, 16, [&](Owners& o, uintptr_t) {
      if (o.in_flight == thread + 1) o.in_flight = 0;
      o.store = note;
    });
    note_write(shared, 16);
  }

 private:
  struct Load {
    uintptr_t p;
    size_t size;
    const void* pc;
    int owner;
    bool writable;
    char value[16];
  };
  struct Write {
    uintptr_t p;
    size_t size;
  };

  uint32_t next_epoch() {
    if (++epoch_ < kMaxEpochs) return epoch_;
    races_ = uninitialised_ = false;  // minutes into a launch without end: notes have no room for more
    return epoch_ = kMaxEpochs - 1;
  }

  static size_t offset(const void* pc) { return reinterpret_cast<uintptr_t>(pc) - memory.module_lo; }

  int site_number(const void* pc) {
    uint16_t& number = site_of_[offset(pc)];
    if (number == 0 && sites_.size() < kMaxSites) {
      number = static_cast<uint16_t>(sites_.size());
      sites_.push_back(pc);
      noted_.push_back(pc);
    }
    return last_site_ = number;
  }

  void check_and_note(uintptr_t p, size_t size, Access access, const void* pc, int site, int owner) {
    if (uninitialised_ && owner >= 0) check_written(p, size, access, pc, owner);
    if (owner == kSharedMemory ? races_ || uninitialised_ : races_)
      pages_.each(p, size, [&](Owners& o, uintptr_t at) {
        if (owner == kSharedMemory) {
          if (races_) check_in_flight(o, at, size, access, pc);
          if (uninitialised_ && reads(access) && !written_in_block(o)) note_unwritten(at, size, access, pc);
        }
        if (races_) check_race(o, at, size, access, pc, owner == kSharedMemory);
        note(o, access, site, owner == kSharedMemory);
      });
    if (trace_->traffic != nullptr && owner >= 0) requests_.add(thread, site, owner, access, p, size);
  }

  // --- reads of what nobody wrote

  static bool reads(Access access) { return access == kLoad || (access == kAtomic && !exchanging); }

  // Shared memory that no thread has written so far. If one still does before the next barrier, that is a race; else
  // `report_unwritten` has the last word.
  void note_unwritten(uintptr_t at, size_t size, Access access, const void* pc) {
    if (unwritten_.kind != kNone) return;
    unwritten_.kind = kUninitialised, unwritten_.address = at, unwritten_.size = size, unwritten_.access = access;
    unwritten_.pc = reinterpret_cast<uint64_t>(pc) - memory.module_base;
    memcpy(unwritten_.block, cuda_host_coordinates.block, sizeof unwritten_.block);
    memcpy(unwritten_.thread, cuda_host_coordinates.thread, sizeof unwritten_.thread);
  }

  // Index of the one Fresh that holds all of a range; -1: it touches none, -2: several, or in part.
  int find_fresh(const Range& r) const {
    int found = -1;
    for (uint64_t i = 0; i < trace_->num_fresh; ++i) {
      const Fresh& f = trace_->fresh[i];
      if (f.lo >= r.hi || f.hi <= r.lo) continue;
      if (f.lo <= r.lo && r.hi <= f.hi) return static_cast<int>(i);
      found = -2;
    }
    return found;
  }

  void check_written(uintptr_t p, size_t size, Access access, const void* pc, int owner) {
    const int only = fresh_of_[owner];
    if (only == -1) return;
    const uint64_t first = only >= 0 ? only : 0, last = only >= 0 ? only + 1 : trace_->num_fresh;
    for (uint64_t i = first; i < last; ++i) {
      const Fresh& f = trace_->fresh[i];
      const uintptr_t lo = std::max(p, f.lo), hi = std::min(p + size, f.hi);
      if (lo >= hi) continue;
      uint8_t* bytes = f.written + (lo - f.lo);
      if (reads(access))
        if (const void* unwritten = memchr(bytes, 0, hi - lo))
          fail(kUninitialised, lo + (static_cast<const uint8_t*>(unwritten) - bytes), size, access, pc);
      if (access != kLoad) memset(bytes, 1, hi - lo);
    }
  }

  bool written_in_block(const Owners& o) const {
    return o.store.epoch >= block_epoch_ || o.atomics[0].epoch >= block_epoch_ || o.atomics[1].epoch >= block_epoch_;
  }

  // --- races

  Note now(int site) const {
    Note note;
    note.epoch = epoch_, note.clock = clocks_[thread], note.thread = thread, note.site = site;
    return note;
  }

  bool foreign(const Note& n) const { return n.epoch < block_epoch_; }  // of another block

  // Whether the running thread comes after what `n` says, or did it itself.
  bool ordered(const Note& n, bool shared) const {
    if (n.epoch == 0) return true;
    if (foreign(n)) return shared;  // shared memory is the block's own
    if (n.epoch < epoch_ || n.thread == thread) return true;
    if (n.thread / 32 != thread / 32) return false;
    return seen_[thread][n.thread % 32] > n.clock || seen_[thread][n.thread % 32] == kLastClock;
  }

  void check_in_flight(const Owners& o, uintptr_t at, size_t size, Access access, const void* pc) {
    if (o.in_flight == 0 || o.store.epoch < block_epoch_) return;
    report(o.store, kCopyInFlight, at, size, access, pc);
  }

  void check_race(const Owners& o, uintptr_t at, size_t size, Access access, const void* pc, bool shared) {
    if (!ordered(o.store, shared)) report(o.store, kStore, at, size, access, pc);
    if (access != kAtomic)
      for (const Note& n : o.atomics)
        if (!ordered(n, shared)) report(n, kAtomic, at, size, access, pc);
    if (access != kLoad)
      for (const Note& n : o.reads)
        if (!ordered(n, shared)) report(n, kLoad, at, size, access, pc);
  }

  [[noreturn]] void report(const Note& first, Access first_access, uintptr_t at, size_t size, Access access, const void* pc) {
    const uint64_t number = block_numbers_[block_of(first)], x = traced_->grid[0], y = traced_->grid[1];
    const uint32_t bx = traced_->block[0], by = traced_->block[1], t = first.thread;
    fault.other_block[0] = number % x, fault.other_block[1] = number / x % y, fault.other_block[2] = number / (x * y);
    fault.other_thread[0] = t % bx, fault.other_thread[1] = t / bx % by, fault.other_thread[2] = t / (bx * by);
    fault.other_access = first_access;
    const void* other = sites_[first.site];
    fault.other_pc = other == nullptr ? 0 : reinterpret_cast<uint64_t>(other) - memory.module_base;
    fail(kRace, at, size, access, pc);
  }

  void note(Owners& o, Access access, int site, bool shared) {
    const Note note = now(site);
    if (access == kLoad) return add(o.reads, note, shared);
    if (access == kAtomic) return add(o.atomics, note, shared);
    o.store = note;  // all that came before is ordered before it
    o.in_flight = 0;
    o.reads[0] = o.reads[1] = o.atomics[0] = o.atomics[1] = Note{};
  }

  // Keeps the two that a later access is likeliest to conflict with: other blocks, then other warps, then other lanes.
  void add(Note (&kept)[2], const Note& note, bool shared) {
    for (Note& n : kept)
      if (n.epoch == 0 || (foreign(n) ? shared : n.epoch < epoch_ || n.thread == note.thread)) {
        n = note;
        return;
      }
    Note &a = kept[0], &b = kept[1];
    if (foreign(a) != foreign(b)) return;
    if (foreign(a)) {
      if (block_of(a) == block_of(b)) b = note;
    } else if (a.thread / 32 == b.thread / 32) {
      if (note.thread / 32 != a.thread / 32 || ordered(b, shared)) b = note;
      else if (ordered(a, shared)) a = note;
    }
  }

  size_t block_of(const Note& n) const {  // in the order in which they ran
    return std::upper_bound(block_epochs_.begin(), block_epochs_.end(), n.epoch) - block_epochs_.begin() - 1;
  }

  // --- stores that g++ does not report

  void note_load(uintptr_t p, size_t size, const void* pc, const Span& span) {
    if (size > sizeof(Load::value)) return;  // copies of larger structs
    if (loads_.size() == kMaxLoads) find_unreported_stores();
    loads_.push_back({p, size, pc, span.owner, span.writable, {}});
    memcpy(loads_.back().value, reinterpret_cast<const void*>(p), size);
  }

  void note_write(uintptr_t p, size_t size) {
    if (loads_.empty()) return;
    if (writes_.size() == kMaxLoads) find_unreported_stores();
    else writes_.push_back({p, size});
  }

  bool written(uintptr_t p, size_t size) const {
    for (const Write& w : writes_)
      if (w.p < p + size && p < w.p + w.size) return true;
    return false;
  }

  static constexpr size_t kMaxLoads = 4096;

  const Launch* traced_ = nullptr;
  const Trace* trace_ = nullptr;
  bool races_ = false, uninitialised_ = false;
  Fault unwritten_ = {};
  uint32_t epoch_ = 0, block_epoch_ = 0;
  std::vector<uint32_t> block_epochs_;   // the first epoch of each block, in the order in which they ran
  std::vector<uint64_t> block_numbers_;  // and its number
  Pages pages_;
  std::vector<uint16_t> site_of_;  // for each byte of the module
  std::vector<const void*> sites_, noted_;
  int last_site_ = 0;
  std::vector<int> fresh_of_;
  std::vector<Load> loads_;
  std::vector<Write> writes_;
  uint16_t clocks_[kMaxThreads] = {}, seen_[kMaxThreads][32] = {};
  RequestCounter requests_;
};

static LaunchRecorder recorder;

static void record(uintptr_t p, size_t size, Access access, const void* pc, const Span& span) {
  if (span.owner != kUnrecorded) recorder.access(p, size, access, pc, span);
}

}  // namespace cuda_host
