// What one warp does with a tile of keys and values in shared memory: dot products, online softmax, weighted values.
//
// Two classes with one interface, chosen by the launcher:
//   MmaWarp<T, D>  16-bit T, 16 rows, tensor cores (mma.m16n8k16). Rows that do not exist are zeros: their work is
//                  free, since the memory is what limits, and even a single row takes fewer instructions this way than
//                  with float32 arithmetic.
//   FmaWarp<D, R>  float32, R rows, IEEE multiply-adds: 4, or for large groups 8 or 16, so that four warps hold a group
//                  of 64 (of 256 columns eight warps, since 16 rows would spill); for smaller ones they would be more
//                  work.
// D is the head size padded to 64, 128 or 256; with WIDE, D columns of a longer head at a time. Both have
//   Element, HEAD, ROWS, CHUNK   the key tile is consumed CHUNK keys at a time
//   WARPS, THREADS               of a program: four warps, or eight, of other rows each, for a group of more than 64
//   PROGRAMS_PER_SM              that the registers must leave room for
//   Dots, add_dots               dot products of the rows from `row` on of the query tile with a chunk of keys
//   absorb                       their weights, and the weighted values
//   store                        results: weighted float [ROWS][HEAD + MERGE_PAD], states [ROWS]
//
// Weights are exp2(score - maximum). Sums are float32. The denominator adds unrounded weights.
#pragma once
#include "paged_attention_fma.cuh"
#include "paged_attention_mma.cuh"
