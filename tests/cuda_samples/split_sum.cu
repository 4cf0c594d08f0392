// The sum of each sequence's rows through a block table, a program per block, and then the sum of the parts. A thread
// for each of WIDTH columns.
constexpr int BLOCK = 16, WIDTH = 32;

extern "C" __global__ void sum_kernel(const signed char* values, const int* table, const int* lens, float* parts,
                                      int block_stride, int row_stride, int num_splits) {
  const int seq = blockIdx.x, split = blockIdx.y, column = threadIdx.x, length = lens[seq];
  if (split * BLOCK >= length) return;
  const long long block = table[seq * num_splits + split];
  float total = 0;
  for (int row = 0; row < BLOCK && split * BLOCK + row < length; ++row) {
    const signed char* at = values + block * block_stride + row * row_stride + column;
    total += *at;
  }
  const int part = seq * num_splits + split;
  parts[part * WIDTH + column] = total;
}

extern "C" __global__ void combine_kernel(const int* lens, const float* parts, float* out, int num_splits) {
  const int seq = blockIdx.x, column = threadIdx.x, count = (lens[seq] + BLOCK - 1) / BLOCK;
  float total = 0;
  for (int split = 0; split < count; ++split) total += parts[(seq * num_splits + split) * WIDTH + column];
  out[seq * WIDTH + column] = total;
}
