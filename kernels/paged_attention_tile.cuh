// How rows of queries, keys and values lie in shared memory.
#pragma once
#include "paged_attention_scores.cuh"

constexpr int MERGE_PAD = 8;  // floats: rows of partial results start eight banks apart

// A row of HEAD elements in shared memory lies in 16-byte pieces, permuted so that eight rows at one piece are in eight
// different groups of banks: ldmatrix, and eight lanes that each read a key, meet no conflict.
template <typename T, int HEAD>
__device__ int swizzled(int row, int piece) {
  constexpr int PIECE = 16 / sizeof(T);
  return row * HEAD + (piece ^ (row & 7)) * PIECE;
}
