// Accesses in and around an array, of several widths. Compiled for a host run, and by g++ as it is with AddressSanitizer:
// both must say the same of each (tests/test_cuda_host_bounds.py).
template <typename T>
__device__ void touch_one(char* array, long long offset, int store, int* out) {
  volatile T* const at = reinterpret_cast<volatile T*>(array + offset);
  if (store) *at = 1;
  else *out += static_cast<int>(*at);
}

// Lane 2 of block 1 does it.
__global__ void around(char* array, long long offset, int width, int store, int* out) {
  if (blockIdx.x != 1 || threadIdx.x != 2) return;
  if (width == 1) touch_one<char>(array, offset, store, out);
  if (width == 2) touch_one<short>(array, offset, store, out);
  if (width == 4) touch_one<int>(array, offset, store, out);
  if (width == 8) touch_one<long long>(array, offset, store, out);
}
