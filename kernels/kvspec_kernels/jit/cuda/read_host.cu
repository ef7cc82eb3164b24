// Copies words from pinned host memory to the device, several parts in one launch. All parts then
// wait for a busy link at the same time, not one after another.

constexpr int kParts = KVSPEC_PARTS;

struct Parts {
  int* target[kParts];
  const int* source[kParts];
  unsigned num_words[kParts];
  unsigned count;
};

// gridDim.x is a multiple of parts.count.
extern "C" __global__ void read_host(const Parts parts) {
  const unsigned part = blockIdx.x % parts.count;
  const unsigned stride = gridDim.x / parts.count * blockDim.x;
  unsigned word = blockIdx.x / parts.count * blockDim.x + threadIdx.x;
  for (; word < parts.num_words[part]; word += stride) {
    parts.target[part][word] = parts.source[part][word];
  }
}
