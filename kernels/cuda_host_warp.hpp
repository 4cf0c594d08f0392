// Warp-wide operations, performed once for all lanes: shuffles, votes, reductions, ldmatrix, mma; and cp.async.
// Included by cuda_host_runtime.cpp only.
#pragma once
#include <cmath>
#include <cstring>

#include "cuda_host_runtime.hpp"
#include "cuda_host_scheduler.hpp"

namespace cuda_host {

static Shuffle& lane_of(void* const* payloads, int lane) { return *static_cast<Shuffle*>(payloads[lane]); }

template <class Visit>
static void each_lane(uint32_t mask, Visit visit) {
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) visit(lane);
}

template <class Source>
static void shuffle(void* const* payloads, uint32_t mask, Source source_of) {
  each_lane(mask, [&](int lane) {
    Shuffle& own = lane_of(payloads, lane);
    const int source = source_of(lane, own);
    if (!(mask >> source & 1)) report_missing_source(lane, source);
    own.result = lane_of(payloads, source).value;
  });
}

// `width` cuts the warp into segments; a source outside the lane's segment means the lane's own value (PTX shfl).
static int segment(int lane, int width) { return lane & ~(width - 1); }

static void shfl_idx(void* const* p, uint32_t mask) {
  shuffle(p, mask, [](int lane, const Shuffle& s) { return segment(lane, s.width) | (s.lane & (s.width - 1)); });
}
static void shfl_up(void* const* p, uint32_t mask) {
  shuffle(p, mask, [](int lane, const Shuffle& s) {
    const int source = lane - (s.lane & 31);
    return source < segment(lane, s.width) ? lane : source;
  });
}
static void shfl_down(void* const* p, uint32_t mask) {
  shuffle(p, mask, [](int lane, const Shuffle& s) {
    const int source = lane + (s.lane & 31);
    return source >= segment(lane, s.width) + s.width ? lane : source;
  });
}
static void shfl_xor(void* const* p, uint32_t mask) {
  shuffle(p, mask, [](int lane, const Shuffle& s) {
    const int source = lane ^ (s.lane & 31);
    return source >= segment(lane, s.width) + s.width ? lane : source;
  });
}

template <class Value>
static void same_for_all(void* const* p, uint32_t mask, Value value) {
  each_lane(mask, [&](int lane) { lane_of(p, lane).result = value; });
}

static uint32_t votes(void* const* p, uint32_t mask) {
  uint32_t ballot = 0;
  each_lane(mask, [&](int lane) { ballot |= lane_of(p, lane).value != 0 ? 1u << lane : 0; });
  return ballot;
}
static void ballot(void* const* p, uint32_t mask) { same_for_all(p, mask, votes(p, mask)); }
static void any(void* const* p, uint32_t mask) { same_for_all(p, mask, votes(p, mask) != 0); }
static void all(void* const* p, uint32_t mask) { same_for_all(p, mask, votes(p, mask) == mask); }
static void nothing(void* const*, uint32_t) {}

static uint32_t matching(void* const* p, uint32_t mask, uint64_t value) {
  uint32_t same = 0;
  each_lane(mask, [&](int lane) { same |= lane_of(p, lane).value == value ? 1u << lane : 0; });
  return same;
}
static void match_any(void* const* p, uint32_t mask) {
  each_lane(mask, [&](int lane) { lane_of(p, lane).result = matching(p, mask, lane_of(p, lane).value); });
}
static void match_all(void* const* p, uint32_t mask) {
  each_lane(mask, [&](int lane) {
    lane_of(p, lane).result = matching(p, mask, lane_of(p, lane).value) == mask ? mask : 0;
  });
}

template <class T, class Combine>
static void reduce(void* const* p, uint32_t mask, Combine combine) {
  bool first = true;
  T total{};
  each_lane(mask, [&](int lane) {
    const T value = static_cast<T>(lane_of(p, lane).value);
    total = first ? value : combine(total, value);
    first = false;
  });
  same_for_all(p, mask, static_cast<uint32_t>(total));
}
#define REDUCE(NAME, T, EXPRESSION) \
  static void NAME(void* const* p, uint32_t mask) { reduce<T>(p, mask, [](T a, T b) -> T { return EXPRESSION; }); }
REDUCE(reduce_add, uint32_t, a + b)
REDUCE(reduce_min, int32_t, a < b ? a : b)
REDUCE(reduce_max, int32_t, a > b ? a : b)
REDUCE(reduce_min_u, uint32_t, a < b ? a : b)
REDUCE(reduce_max_u, uint32_t, a > b ? a : b)
REDUCE(reduce_and, uint32_t, a & b)
REDUCE(reduce_or, uint32_t, a | b)
REDUCE(reduce_xor, uint32_t, a ^ b)
#undef REDUCE

static float bf16_bits(uint32_t bits) {
  const uint32_t wide = bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static float half_bits(uint32_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

static const float* half_table() {
  static float* table = nullptr;
  if (table == nullptr) {
    table = new float[65536];
    for (uint32_t bits = 0; bits < 65536; ++bits) table[bits] = half_bits(bits);
  }
  return table;
}

// Element `i` (0 low, 1 high) of a register holding two 16-bit numbers.
static float element(uint32_t pair, int i, bool half) {
  const uint32_t bits = pair >> (16 * i) & 0xFFFF;
  return half ? half_table()[bits] : bf16_bits(bits);
}

// PTX mma.m16n8k16, groupID = lane / 4, tig = lane % 4:
//   a[r] holds A[groupID + 8 * (r & 1)][2 * tig + i + 8 * (r >> 1)], i = 0, 1
//   b[r] holds B[2 * tig + i + 8 * r][groupID]
//   c[e], d[e] hold C[groupID + 8 * (e >> 1)][2 * tig + (e & 1)]
// The products are exact; their sum is rounded once (a tensor core may round more often, never less exactly specified).
static void mma(void* const* payloads, uint32_t mask) {
  double a[16][16], b[16][8], sums[16][8];
  const bool half = static_cast<const Mma*>(payloads[__builtin_ctz(mask)])->half;
  memset(a, 0xFF, sizeof a);  // a lane that takes no part brings NaN
  memset(b, 0xFF, sizeof b);
  memset(sums, 0xFF, sizeof sums);
  each_lane(mask, [&](int lane) {
    const Mma& m = *static_cast<const Mma*>(payloads[lane]);
    const int group = lane / 4, tig = lane % 4;
    for (int r = 0; r < 4; ++r)
      for (int i = 0; i < 2; ++i) a[group + 8 * (r & 1)][2 * tig + i + 8 * (r >> 1)] = element(m.a[r], i, half);
    for (int r = 0; r < 2; ++r)
      for (int i = 0; i < 2; ++i) b[2 * tig + i + 8 * r][group] = element(m.b[r], i, half);
    for (int e = 0; e < 4; ++e) sums[group + 8 * (e >> 1)][2 * tig + (e & 1)] = m.c[e];
  });
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
  each_lane(mask, [&](int lane) {
    float* d = static_cast<const Mma*>(payloads[lane])->d;
    for (int e = 0; e < 4; ++e) d[e] = static_cast<float>(sums[lane / 4 + 8 * (e >> 1)][2 * (lane % 4) + (e & 1)]);
  });
}

// PTX ldmatrix: lane 8 * m + r gives the address of row r of 8x8 matrix m; register m of every lane receives elements
// 2 * (lane % 4) and + 1 of row lane / 4 (with .trans, of column lane / 4).
static void ldmatrix(void* const* payloads, uint32_t mask) {
  uint16_t rows[32][8];
  memset(rows, 0xFF, sizeof rows);
  const Ldmatrix& first = *static_cast<const Ldmatrix*>(payloads[__builtin_ctz(mask)]);
  each_lane(mask, [&](int lane) {
    if (lane < 8 * first.count) memcpy(rows[lane], static_cast<const Ldmatrix*>(payloads[lane])->row, 16);
  });
  each_lane(mask, [&](int lane) {
    const Ldmatrix& l = *static_cast<const Ldmatrix*>(payloads[lane]);
    for (int m = 0; m < l.count; ++m) {
      const int i = lane / 4, j = 2 * (lane % 4);
      const uint32_t low = l.trans ? rows[8 * m + j][i] : rows[8 * m + i][j];
      const uint32_t high = l.trans ? rows[8 * m + j + 1][i] : rows[8 * m + i][j + 1];
      l.r[m] = low | high << 16;
    }
  });
}

const Collective kShflIdx{"__shfl_sync", shfl_idx}, kShflUp{"__shfl_up_sync", shfl_up},
    kShflDown{"__shfl_down_sync", shfl_down}, kShflXor{"__shfl_xor_sync", shfl_xor}, kBallot{"__ballot_sync", ballot},
    kAny{"__any_sync", any}, kAll{"__all_sync", all}, kSyncwarp{"__syncwarp", nothing},
    kMatchAny{"__match_any_sync", match_any}, kMatchAll{"__match_all_sync", match_all},
    kReduceAdd{"__reduce_add_sync", reduce_add}, kReduceMin{"__reduce_min_sync", reduce_min},
    kReduceMax{"__reduce_max_sync", reduce_max}, kReduceAddU{"__reduce_add_sync", reduce_add},
    kReduceMinU{"__reduce_min_sync", reduce_min_u}, kReduceMaxU{"__reduce_max_sync", reduce_max_u},
    kReduceAnd{"__reduce_and_sync", reduce_and}, kReduceOr{"__reduce_or_sync", reduce_or},
    kReduceXor{"__reduce_xor_sync", reduce_xor}, kMma{"mma.sync", mma}, kLdmatrix{"ldmatrix", ldmatrix};

// cp.async lands at the wait, not before: a kernel that forgets to wait reads what was there.
void cp_async(void* shared, const void* global, int source_bytes) {
  const void* pc = recording ? recorder.copy_issued(reinterpret_cast<uintptr_t>(shared)) : nullptr;
  current->copies.push_back({shared, global, source_bytes, pc});
}

void cp_async_commit() {
  size_t committed = 0;
  for (size_t n : current->groups) committed += n;
  current->groups.push_back(current->copies.size() - committed);
}

void cp_async_wait(int keep) {
  auto& groups = current->groups;
  auto& copies = current->copies;
  size_t landing = 0;
  const size_t finished = keep < 0 ? groups.size() : groups.size() > size_t(keep) ? groups.size() - keep : 0;
  for (size_t i = 0; i < finished; ++i) landing += groups[i];
  if (keep < 0) landing = copies.size();
  for (size_t i = 0; i < landing; ++i) {
    memcpy(copies[i].to, copies[i].from, copies[i].bytes);
    memset(static_cast<char*>(copies[i].to) + copies[i].bytes, 0, 16 - copies[i].bytes);
    if (recording) recorder.copy_landed(reinterpret_cast<uintptr_t>(copies[i].to), copies[i].pc);
  }
  copies.erase(copies.begin(), copies.begin() + landing);
  groups.erase(groups.begin(), groups.begin() + finished);
}

}  // namespace cuda_host
