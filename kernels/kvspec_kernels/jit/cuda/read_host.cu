// Words from pinned host memory into memory on the device.

extern "C" __global__ void read_host(int* target, const int* source, long long num_words) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  long long word = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; word < num_words; word += stride) target[word] = source[word];
}
