// From a dot product to a score: scale, soft cap, ALiBi, and which keys a row sees. Scores are in base 2.
#pragma once
#include "paged_attention_splits.cuh"

// Sum of the weights relative to exp2(maximum); -inf and 0 before the first key.
struct State {
  float maximum, sum;
};

// One row of a tile. `position` is its query's, or more than any key's where all are seen; `slope` is ALiBi's in base
// 2.
struct Row {
  long long out;  // of out and lse
  int position;
  float slope;
};

// Some keys of a tile: `visible` of them exist; `first` is the position of the first. simple: a score is the dot
// product times scale, and every row sees every key. factors: of each key and value, or null.
struct Chunk {
  int visible, first;
  bool simple;
  const float2* factors;
};

// scale: to base 2, where there is no soft cap. cap: in base 2, 0 for none; inverse_cap: to the argument of its tanh,
// a factor of its own, since float32 might not hold scale / cap before a key's scale.
struct Scoring {
  float scale, cap, inverse_cap;
  unsigned window;
  bool slopes;
  const Row* rows;

  __device__ float score(float dot, int key, const Chunk& chunk, const Row& row) const {
    float s = dot * scale;
    if (chunk.factors != nullptr) s *= chunk.factors[key].x;
    if (cap > 0) s = cap * tanhf(s * inverse_cap);  // exp and a division, or a polynomial near 0: within two units
    const int behind = row.position - (chunk.first + key);
    if (slopes) s -= row.slope * static_cast<float>(behind);
    return key < chunk.visible && static_cast<unsigned>(behind) < window ? s : -kInfinity;
  }
};

// The maximum after more scores, and the factor for what was summed relative to the old one. `reference` replaces a
// maximum of -inf, where nothing was seen, so that no infinities are subtracted.
struct Rescale {
  float maximum, reference, factor;
  __device__ Rescale(float old_maximum, float new_scores)
      : maximum(fmaxf(old_maximum, new_scores)),
        reference(maximum == -kInfinity ? 0.0f : maximum),
        factor(exp2f(old_maximum - reference)) {}
};
