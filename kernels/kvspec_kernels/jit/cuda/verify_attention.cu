// Attention of several query tokens a request over anchor and 4-bit correction pages (the int8
// target), for Hopper. A block of 4 warps takes 64 tokens of KV at a time: each warp restores 16
// tokens of K in registers, which are multiplied with all queries (wgmma), then a quarter of V's
// channels, which are multiplied with all probabilities. These and the queries pass through shared
// memory; no restored value does, and none is restored twice by a block. Blocks share the pages of
// all requests, KV heads and column blocks (GROUP x tokens, 8 COLUMNS at a time) equally.
//
// Values are fp16: K and V = x s + z, where x is the 8-bit code (uniform4: / 16), exact, and s, z are
// those of channel or token. Scores come out of the products less the running maxima, integers that
// are one more channel of K and Q; only probabilities that grow too large move them. Queries see every token of these pages: causality matters in the tail only.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM PAGE_SIZE (multiples of 64) GROUP COLUMNS K_ROWS
// V_ROWS LOG4 Q_BF16 HALVES BLOCKS K_BYTES V_BYTES RECORD_BYTES RESIDUAL_BYTES MAX_BATCH and TOP.

#include "hopper.cuh"

constexpr int WARPS = 4, THREADS = 128;
constexpr int CHANNEL_TILES = HEAD_DIM / 16, TOKEN_TILES = PAGE_SIZE / 16;
constexpr int OWN_TILES = CHANNEL_TILES / WARPS;  // channel tiles of V of a warp
constexpr int STEPS = TOKEN_TILES / WARPS;        // 64 tokens each
constexpr int K_CHUNK_TILES = TOKEN_TILES / K_ROWS, V_CHUNK_TILES = TOKEN_TILES / V_ROWS;
constexpr int COLS = COLUMNS * 8;
// Probabilities, relative to the running maximum when it was last taken, may grow to 2^10, as fp16.
constexpr u32 LARGEST_PROB = 0x6400;

constexpr int CODE_BYTES = PAGE_SIZE * HEAD_DIM / 2;
constexpr int K_CODES = LOG4 ? 16 : 0;
constexpr int K_META = K_CODES + CODE_BYTES;
constexpr int K_META2 = K_META + K_ROWS * HEAD_DIM * 2;
constexpr int V_META = CODE_BYTES;
constexpr int V_META2 = V_META + (LOG4 ? V_ROWS * HEAD_DIM * 2 : PAGE_SIZE * 2);
// Halves of a page in shared memory, K and V by turns: the anchor's part, the correction's codes.
constexpr int PAGE_BYTES = K_BYTES + V_BYTES + 2 * CODE_BYTES;
static_assert(HALVES % 2 == 0);
__device__ __forceinline__ u32 half_offset(u32 slot) {
    return slot / 2 * PAGE_BYTES + (slot % 2 ? K_BYTES + CODE_BYTES : 0);
}

constexpr int QUERY_BYTES = CHANNEL_TILES * COLUMNS * 256 + COLUMNS * 128;
constexpr int PROB_BYTES = WARPS * COLUMNS * 256;
constexpr int META_BYTES = WARPS * CHANNEL_TILES * 64;
constexpr int V_META_BYTES = WARPS * (OWN_TILES * 8 > 16 ? OWN_TILES * 8 : 16) * 16;
static_assert(META_BYTES >= WARPS * COLS * 4);
constexpr int STAT_BYTES = 2 * COLS * 4;
// Sums of probabilities are taken in tiles of 16 columns and 16 tokens; those of a warp, and warps
// that share 16 columns.
constexpr int SUM_TILES = COLUMNS > 1 ? COLUMNS / 2 : 1, SHARES = WARPS / SUM_TILES;

// d[column][4] (+)= a b for the block's 64 rows, 16 of each warp, and all columns; the left operand
// is in registers, as for mma.m16n8k16, the right one [columns][16] in shared memory.
#define ACC(c) "+f"(d[c][0]), "+f"(d[c][1]), "+f"(d[c][2]), "+f"(d[c][3])
#if COLUMNS == 1
#define SHAPE "m64n8k16"
#define ACCS "%0,%1,%2,%3"
#define REST "{%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"
#define ADDS "%9"
#define OPERANDS ACC(0)
#elif COLUMNS == 2
#define SHAPE "m64n16k16"
#define ACCS "%0,%1,%2,%3,%4,%5,%6,%7"
#define REST "{%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"
#define ADDS "%13"
#define OPERANDS ACC(0), ACC(1)
#elif COLUMNS == 4
#define SHAPE "m64n32k16"
#define ACCS "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REST "{%16,%17,%18,%19}, %20, p, 1, 1, 0;\n}"
#define ADDS "%21"
#define OPERANDS ACC(0), ACC(1), ACC(2), ACC(3)
#else
#define SHAPE "m64n64k16"
#define ACCS                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
    "%24,%25,%26,%27,%28,%29,%30,%31"
#define REST "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
#define ADDS "%37"
#define OPERANDS ACC(0), ACC(1), ACC(2), ACC(3), ACC(4), ACC(5), ACC(6), ACC(7)
#endif
__device__ __forceinline__ void warpgroup_mma(
    float (&d)[COLUMNS][4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\n"
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32.f16.f16 {" ACCS "}, " REST
                 : OPERANDS
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)adds));
}

__device__ __forceinline__ void warpgroup_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Right operands lie in core matrices of 8 columns x 8 (16 bytes a column), those of all columns
// after each other, then the next 8 of the inner dimension; two of them make a product.
constexpr int CORE_ROW = COLUMNS * 128;
__device__ __forceinline__ u64 operand(const void* matrix) {
    return (u64)(shared_address(matrix) >> 4) | (u64)(CORE_ROW >> 4) << 16 | (u64)(128 >> 4) << 32;
}

__device__ __forceinline__ u32 nibbles(u32 x) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(r) : "r"(x), "r"(0x77777777u), "r"(0x0f0f0f0fu));
    return r;
}

// The 8-bit codes of two words as two halves a register, exact; uniform4's as multiples of 1 / 16.
__device__ __forceinline__ void restore(u32 word, u32 correction, u32 (&x)[4]) {
#if LOG4
    // Integer I = 16 m - r: byte (m, r ^ 7) less 7; then the sign. Bytes are those of codes 0, 5, 1,
    // 4 and 2, 7, 3, 6, in which order the magnitudes lie.
    u32 swapped = prmt(correction, correction, 0x1230), turned = word << 4;
    u32 even = and_or(word, 0x70707070u, nibbles(swapped));
    u32 odd = and_or(turned, 0x70707070u, nibbles(swapped >> 4));
    u32 codes[4] = {prmt(even, 0x64646464u, 0x4240), prmt(odd, 0x64646464u, 0x4240),
                    prmt(even, 0x64646464u, 0x4143), prmt(odd, 0x64646464u, 0x4143)};
    u32 signs[4] = {word, turned, word << 8, word << 12};
#pragma unroll
    for (int r = 0; r < 4; ++r)
        asm("lop3.b32 %0, %1, %2, %3, 0x6A;"  // (a & b) ^ c
            : "=r"(x[r]) : "r"(signs[r]), "r"(0x80008000u), "r"(half2_add(codes[r], 0xe407e407u)));
#else
    // 16 u + l: byte (u, l ^ 8) less 8. Bytes are those of codes 0, 4, 1, 5 and 2, 6, 3, 7.
    u32 lower = correction ^ 0x88888888u;
    u32 even = select(0xf0f0f0f0u, word << 4, lower);
    u32 odd = select(0xf0f0f0f0u, word, lower >> 4);
    u32 codes[4] = {prmt(even, 0x64646464u, 0x4240), prmt(odd, 0x64646464u, 0x4240),
                    prmt(even, 0x64646464u, 0x4341), prmt(odd, 0x64646464u, 0x4341)};
#pragma unroll
    for (int r = 0; r < 4; ++r) x[r] = half2_fma(codes[r], 0x2c002c00u, 0xd408d408u);
#endif
}

__device__ __forceinline__ float log_scale(int base, u32 offset) {
    return __uint_as_float((u32)(base + (int)offset) << 19) * (1.0f / TOP);
}

// Scale and zero of a warp's 16 tokens of K: [channel tile][t] {s 2t 2t+1, z, s 2t+8 2t+9, z}.
__device__ __forceinline__ void convert_k(uint4* meta, const u8* part, int row_tile, int lane) {
    int chunk = row_tile / K_CHUNK_TILES;
    for (int e = lane; e < CHANNEL_TILES * 4; e += 32) {
        int at = chunk * HEAD_DIM + (e % 4 * CHANNEL_TILES + e / 4) * 4;
        uint4 r;
#if LOG4
        int base = *reinterpret_cast<const short*>(part);
        Words<2> zero = load_shared<2>(part + K_META + at * 2);
        u32 offset = load_shared<1>(part + K_META2 + at).w[0];
        r.x = to_half2(log_scale(base, offset & 255), log_scale(base, offset >> 8 & 255));
        r.z = to_half2(log_scale(base, offset >> 16 & 255), log_scale(base, offset >> 24));
#else
        Words<2> scale = load_shared<2>(part + K_META + at * 2);
        Words<2> zero = load_shared<2>(part + K_META2 + at * 2);
        r.x = to_half2(low_bf16(scale.w[0]), high_bf16(scale.w[0]));
        r.z = to_half2(low_bf16(scale.w[1]), high_bf16(scale.w[1]));
#endif
        r.y = to_half2(low_bf16(zero.w[0]), high_bf16(zero.w[0]));
        r.w = to_half2(low_bf16(zero.w[1]), high_bf16(zero.w[1]));
        meta[e] = r;
    }
}

// uniform4: scale and zero of 64 tokens: [token tile][t] {s 2t 2t+1, s 2t+8 2t+9, zeros likewise}; 0
// from token `valid` on. log4: of a warp's channels: [own tile][g][row g, g + 8] {s twice, z twice}.
__device__ __forceinline__ void convert_v(
    uint2* meta, const u8* part, int base, int step, int valid, int warp, int lane) {
#if LOG4
    int chunk = step * WARPS / V_CHUNK_TILES;
    for (int e = lane; e < OWN_TILES * 16; e += 32) {
        int at = chunk * HEAD_DIM +
                 (e / 2 % 8 * CHANNEL_TILES + e / 16 * WARPS + warp) * 2 + e % 2;
        float s = log_scale(base, part[V_META2 + at]);
        float z = low_bf16(*reinterpret_cast<const u16*>(part + V_META + at * 2));
        meta[e] = make_uint2(to_half2(s, s), to_half2(z, z));
    }
#else
    int of_zero = lane / 16, tile = lane / 4 % 4, t = lane % 4;
    const u8* word = part + (of_zero ? V_META2 : V_META) +
                     (2 * t * TOKEN_TILES + step * WARPS + tile) * 4;
    u32 even = load_shared<1>(word).w[0], odd = load_shared<1>(word + TOKEN_TILES * 4).w[0];
    u32 low = to_half2(low_bf16(even), low_bf16(odd));
    u32 high = to_half2(high_bf16(even), high_bf16(odd));
    if (valid < PAGE_SIZE) {
        int left = valid - (step * WARPS + tile) * 16 - 2 * t;
        low &= left > 1 ? 0xffffffffu : left > 0 ? 0xffffu : 0;
        high &= left > 9 ? 0xffffffffu : left > 8 ? 0xffffu : 0;
    }
    meta[(tile * 4 + t) * 2 + of_zero] = make_uint2(low, high);
#endif
}

// x s + z; a value beyond fp16 becomes the largest, as the KV of an fp16 model was.
__device__ __forceinline__ u32 scaled(u32 x, u32 s, u32 z) {
    u32 r = half2_fma(x, s, z);
#if !Q_BF16
    asm("min.f16x2 %0, %0, %1;" : "+r"(r) : "r"(0x7bff7bffu));
    asm("max.f16x2 %0, %0, %1;" : "+r"(r) : "r"(0xfbfffbffu));
#endif
    return r;
}

__device__ __forceinline__ u32 weights_of(float score, float next) {
    return to_half2(exp2_approx(score), exp2_approx(next));
}

// A running maximum as halves whose sum, weighted with 32768, 32 and 1, is minus it, exactly.
__device__ __forceinline__ void store_top(u8* parts, float top) {
    float rest = -top, weight = 32768.0f;
    u32 halves[3];
#pragma unroll
    for (int i = 0; i < 3; ++i, weight = i == 1 ? 32.0f : 1.0f) {
        halves[i] = to_half2(rest * (1.0f / weight), 0.0f) & 0xffff;
        rest -= half_to_float((u16)halves[i]) * weight;
    }
    *reinterpret_cast<uint2*>(parts) = make_uint2(halves[0] | halves[1] << 16, halves[2]);
}

struct Segment {
    int b, head, block, first_query, num_queries, num_columns;  // of this column block
};

__device__ __forceinline__ i64 out_row(const Segment& s, int column, int num_kv_heads) {
    int global = s.block * COLS + column;
    return (i64)(s.first_query + global / GROUP) * num_kv_heads * GROUP + s.head * GROUP +
           global % GROUP;
}

__device__ __forceinline__ void merge_parts(
    const float* partial_out, const float* partial_stat, int first, int last, int first_slot,
    const Segment& segment, int num_kv_heads, void* out, float* lse) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto part_of = [&](int worker) {
        return (i64)(2 * worker + (worker == first ? first_slot : 0)) * COLS;
    };
    for (int c = warp; c < segment.num_columns; c += WARPS) {
        float top = NEG_INF;
        for (int w = first + lane; w <= last; w += 32)
            top = fmaxf(top, __ldcg(partial_stat + (part_of(w) + c) * 2));
        for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
        float sum = 0.0f, x[HEAD_DIM / 32];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i) x[i] = 0.0f;
#pragma unroll 4
        for (int w = first; w <= last; ++w) {
            i64 part = part_of(w) + c;
            float weight = exp2_approx(__ldcg(partial_stat + part * 2) - top);
            sum += weight * __ldcg(partial_stat + part * 2 + 1);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; ++i)
                x[i] += weight * __ldcg(partial_out + part * HEAD_DIM + i * 32 + lane);
        }
        i64 row = out_row(segment, c, num_kv_heads);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i)
            store_output(out, row * HEAD_DIM + i * 32 + lane, x[i] / sum);
        if (lane == 0) lse[row] = top + log2f(sum);
    }
}

// q, out: [num_tokens, num_kv_heads * GROUP, HEAD_DIM]; lse: [num_tokens, num_kv_heads * GROUP],
// base 2. partial_out: [2 * grid, COLS, HEAD_DIM], partial_stat: [2 * grid, COLS, 2] (max, sum).
// arrived: [batch * num_kv_heads * max_blocks], zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) verify_attention(
    const u16* __restrict__ q, i64 q_stride, i64 q_head_stride, const u8* __restrict__ anchors,
    i64 page_stride, const u8* __restrict__ residuals, i64 slot_stride,
    const int* __restrict__ residual_slots, const int* __restrict__ qo_indptr,
    const int* __restrict__ indptr, const int* __restrict__ indices,
    const int* __restrict__ last_page_len, int batch, int num_tokens, int num_kv_heads,
    int max_blocks, float scale_log2, float* __restrict__ partial_out,
    float* __restrict__ partial_stat, int* __restrict__ arrived, void* __restrict__ out,
    float* __restrict__ lse) {
    extern __shared__ __align__(128) u8 memory[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int g = lane >> 2, t = lane & 3;
    // The tops' parts are 8 more channels of the query, whose other 8 are multiplied by zero.
    u8* top_parts = memory;
    u8* query = memory + CORE_ROW;
    // Twice: some warps may store the next step's while others still read this one's.
    u8* probs = memory + QUERY_BYTES;
    // Where the lane's column of this warp's tokens starts: 8 tokens, the other 8, the next columns.
    u32 prob_column = shared_address(probs) + (2 * warp + (lane >> 3 & 1)) * CORE_ROW +
                      (lane >> 4) * 128 + (lane & 7) * 16;
    u32 sum_row = shared_address(probs) +
                  (warp * SUM_TILES % WARPS * 2 + (COLUMNS > 1 ? lane >> 4 : lane >> 3)) * CORE_ROW +
                  (warp * SUM_TILES / WARPS * 2 + (COLUMNS > 1 ? lane >> 3 & 1 : 0)) * 128 +
                  (lane & 7) * 16;
    int sum_column = warp * SUM_TILES / WARPS * 16 + g;
    // Weights of the tops' parts, as a left operand: 32768, 32 and 1 for all tokens.
    u32 weights = t == 0 ? 0x50007800u : t == 1 ? 0x00003c00u : 0;
    const u32 top_weights[4] = {weights, weights, 0, 0};
    uint4* k_meta = reinterpret_cast<uint4*>(memory + QUERY_BYTES + 2 * PROB_BYTES) +
                    warp * CHANNEL_TILES * 4;
    u8* after = memory + QUERY_BYTES + 2 * PROB_BYTES + META_BYTES;
    uint2* v_meta = reinterpret_cast<uint2*>(after) + warp * (V_META_BYTES / WARPS / 8);
    // [WARPS][COLS], where K's metadata is that no warp needs any more.
    float* stats = reinterpret_cast<float*>(memory + QUERY_BYTES + 2 * PROB_BYTES);
    float* rises = reinterpret_cast<float*>(after + V_META_BYTES);  // [COLS]: of the running maxima
    float* tops = rises + COLS;  // [COLS]: the running maxima, integers; 0 at first
    u8* ring = after + V_META_BYTES + STAT_BYTES;
    u32 barrier = shared_address(ring + HALVES / 2 * PAGE_BYTES);
    int* flags = reinterpret_cast<int*>(ring + HALVES / 2 * PAGE_BYTES + HALVES * 8);
    int* starts = flags + 4;  // [MAX_BATCH + 1]: units before each request

    if (threadIdx.x == 0) {
        for (int i = 0; i < HALVES; ++i) barrier_init(barrier + 8 * i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    if (warp == 0) {
        int before = 0;
        for (int first = 0; first < batch; first += 32) {
            int b = first + lane, units = 0;
            if (b < batch) {
                int queries = qo_indptr[b + 1] - qo_indptr[b];
                units = (indptr[b + 1] - indptr[b]) * num_kv_heads *
                        ((queries * GROUP + COLS - 1) / COLS);
            }
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(FULL, units, step);
                if (lane >= step) units += other;
            }
            if (b < batch) starts[b + 1] = before + units;
            before += __shfl_sync(FULL, units, 31);
        }
        if (lane == 0) starts[0] = 0;
    }
    __syncthreads();

    i64 total = starts[batch];
    int workers = total < gridDim.x ? (int)total : (int)gridDim.x;
    int worker = blockIdx.x;
    i64 begin = 0, end = 0;
    if (worker < workers) {
        begin = first_unit(total, worker, workers);
        end = first_unit(total, worker + 1, workers);
    }
    u32 sequence = 0, prob_offset = 0;
    bool is_first = true;

    while (begin < end) {
        Segment s;
        s.b = request_of(starts, batch, (int)begin);
        int first_index = indptr[s.b], num_pages = indptr[s.b + 1] - first_index;
        s.first_query = qo_indptr[s.b];
        s.num_queries = qo_indptr[s.b + 1] - s.first_query;
        int num_blocks = (s.num_queries * GROUP + COLS - 1) / COLS;
        i64 within = begin - starts[s.b];
        int page = (int)(within % num_pages);
        s.block = (int)(within / num_pages % num_blocks);
        s.head = (int)(within / num_pages / num_blocks);
        s.num_columns = min(COLS, s.num_queries * GROUP - s.block * COLS);
        int count = (int)min((i64)(num_pages - page), end - begin);
        const int* pages = indices + first_index + page;
        int tail = page + count == num_pages ? last_page_len[s.b] : PAGE_SIZE;
        auto fetch_part = [&](int n) {
            if (threadIdx.x != 0 || (n >> 1) >= count) return;
            int id = pages[n >> 1], which = n & 1;
            u32 slot = (sequence + n) % HALVES, bytes = which ? V_BYTES : K_BYTES;
            u32 target = shared_address(ring) + half_offset(slot), full = barrier + 8 * slot;
            const u8* anchor = anchors + id * page_stride + (i64)s.head * RECORD_BYTES;
            const u8* residual =
                residuals + residual_slots[id] * slot_stride + (i64)s.head * RESIDUAL_BYTES;
            expect(full, bytes + CODE_BYTES);
            copy_bulk(target, anchor + (which ? K_BYTES : 0), bytes, full);
            copy_bulk(target + bytes, residual + which * CODE_BYTES, CODE_BYTES, full);
        };
#pragma unroll
        for (int n = 0; n < HALVES; ++n) fetch_part(n);

        for (int i = threadIdx.x; i < CHANNEL_TILES * COLUMNS * 32; i += THREADS) {
            int l = i % 32, column = i / 32 % COLUMNS, tile = i / 32 / COLUMNS;
            int c = column * 8 + (l >> 2), global = s.block * COLS + c;
            u32 halves[2] = {0, 0};
            if (c < s.num_columns) {
                const u16* row = q + (i64)(s.first_query + global / GROUP) * q_stride +
                                 (i64)(s.head * GROUP + global % GROUP) * q_head_stride;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 pair = *reinterpret_cast<const u32*>(row + tile * 16 + half * 8 + 2 * (l & 3));
#if Q_BF16
                    float low = low_bf16(pair), high = high_bf16(pair);
#else
                    float low = half_to_float((u16)pair), high = half_to_float((u16)(pair >> 16));
#endif
                    halves[half] = to_half2(low * scale_log2, high * scale_log2);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<u32*>(query + (2 * tile + half) * CORE_ROW + column * 128 + l * 4) =
                    halves[half];
        }
        for (int i = threadIdx.x; i < COLS; i += THREADS) {
            tops[i] = 0.0f;
            reinterpret_cast<uint4*>(top_parts)[i] = make_uint4(0, 0, 0, 0);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        float sums[4] = {}, result[OWN_TILES][COLUMNS][4];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
            for (int own = 0; own < OWN_TILES; ++own)
                for (int i = 0; i < 4; ++i) result[own][column][i] = 0.0f;
        __syncthreads();

#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            u32 k_slot = (sequence + 2 * i) % HALVES, v_slot = (sequence + 2 * i + 1) % HALVES;
            const u8* k_part = ring + half_offset(k_slot);
            const u8* v_part = ring + half_offset(v_slot);
            int valid = i + 1 == count ? tail : PAGE_SIZE;
            barrier_wait(barrier + 8 * k_slot, (sequence + 2 * i) / HALVES & 1);
#if LOG4
            int v_base = *reinterpret_cast<const short*>(k_part + 2);
#else
            int v_base = 0;
#endif
#pragma unroll 1
            for (int step = 0; step < STEPS; ++step) {
                int row_tile = step * WARPS + warp;
                __syncwarp();
                convert_k(k_meta, k_part, row_tile, lane);
                __syncwarp();
                float scores[COLUMNS][4];  // less the tops
                u32 a[CHANNEL_TILES][4];
                u64 right = operand(query);
#pragma unroll
                for (int tile = 0; tile < CHANNEL_TILES; tile += 4) {
                    int index = row_tile * CHANNEL_TILES + tile;
                    Words<4> word = load_shared<4>(k_part + K_CODES + (index / 4 * 32 + lane) * 16);
                    Words<4> low =
                        load_shared<4>(k_part + K_BYTES + (index / 4 * 32 + lane) * 16);
                    if (tile == 0) {
                        // The last step's products with V; none may be under way from here on.
                        warpgroup_wait();
                        warpgroup_begin();
                        warpgroup_mma(scores, top_weights, operand(top_parts), false);
                    }
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        u32 (&x)[4] = a[tile + k];
                        restore(word.w[k], low.w[k], x);
                        uint4 m = k_meta[(tile + k) * 4 + t];
                        x[0] = scaled(x[0], m.x, m.y);
                        x[1] = scaled(x[1], m.x, m.y);
                        x[2] = scaled(x[2], m.z, m.w);
                        x[3] = scaled(x[3], m.z, m.w);
                    }
                    warpgroup_begin();
#pragma unroll
                    for (int k = tile; k < tile + 4; ++k)
                        warpgroup_mma(scores, a[k], right + (k * 2 * CORE_ROW >> 4), true);
                    warpgroup_commit();
                }
                warpgroup_wait();
                if (valid < PAGE_SIZE) {
#pragma unroll
                    for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            if (row_tile * 16 + g + (j >> 1) * 8 >= valid)
                                scores[column][j] = NEG_INF;
                }
                u32 largest = 0;
                prob_offset ^= PROB_BYTES;
                auto weigh = [&]() {
#if COLUMNS == 1
                    u32 low = weights_of(scores[0][0], scores[0][1]);
                    u32 high = weights_of(scores[0][2], scores[0][3]);
                    largest = max_u16x2(low, high);
                    store_transposed(prob_column + prob_offset, low, high);
#else
#pragma unroll
                    for (int c = 0; c < COLUMNS; c += 2) {
                        u32 p[4];
#pragma unroll
                        for (int k = 0; k < 4; ++k)
                            p[k] = weights_of(scores[c + k / 2][k % 2 * 2],
                                              scores[c + k / 2][k % 2 * 2 + 1]);
                        largest = max_u16x2(max_u16x2(largest, p[0]), p[1]);
                        largest = max_u16x2(max_u16x2(largest, p[2]), p[3]);
                        store_transposed(prob_column + prob_offset + c * 128, p[0], p[1], p[2],
                                         p[3]);
                    }
#endif
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                };
                weigh();
                if (step == 0)
                    barrier_wait(barrier + 8 * v_slot, (sequence + 2 * i + 1) / HALVES & 1);
                convert_v(v_meta, v_part, v_base, step, valid, warp, lane);
                bool is_first_step = i == 0 && step == 0;
                // Carries into the highest bit of a half from LARGEST_PROB on.
                bool grew = (largest + (0x8000 - LARGEST_PROB) * 0x10001 & 0x80008000u) != 0;
                // Past this point all have stored their probabilities, and nobody reads this K nor
                // the last step's probabilities or V.
                if (__syncthreads_or(is_first_step || grew)) {
#pragma unroll
                    for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            float m = fmaxf(scores[column][j], scores[column][j + 2]);
                            for (int hop = 4; hop < 32; hop *= 2)
                                m = fmaxf(m, __shfl_xor_sync(FULL, m, hop));
                            if (g == 0) stats[warp * COLS + column * 8 + 2 * t + j] = m;
                        }
                    __syncthreads();
                    if (threadIdx.x < COLS) {
                        int c = threadIdx.x;
                        float m = stats[c];
#pragma unroll
                        for (int w = 1; w < WARPS; ++w) m = fmaxf(m, stats[w * COLS + c]);
                        float rise = is_first_step ? rintf(m) : fmaxf(rintf(m), 0.0f);
                        rises[c] = rise;
                        tops[c] += rise;
                        store_top(top_parts + c * 16, tops[c]);
                    }
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    __syncthreads();
                    // Before the first step there is nothing to shrink, whatever the rise.
                    auto shrink = [&](int c) {
                        return is_first_step ? 0.0f : exp2_approx(-rises[c]);
                    };
#pragma unroll
                    for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            int c = column * 8 + 2 * t + j;
                            scores[column][j] -= rises[c];
                            scores[column][j + 2] -= rises[c];
#pragma unroll
                            for (int own = 0; own < OWN_TILES; ++own) {
                                result[own][column][j] *= shrink(c);
                                result[own][column][j + 2] *= shrink(c);
                            }
                        }
                    sums[0] *= shrink(sum_column);
                    if (COLUMNS > 1) sums[2] *= shrink(sum_column + 8);
                    weigh();
                    __syncthreads();
                }
                if (step == 0 && i > 0) fetch_part(2 * i - 1 + HALVES);
                if (step == STEPS - 1) fetch_part(2 * i + HALVES);
#pragma unroll
                for (int k = 0; k < SUM_TILES; ++k) {
                    u32 p[4] = {};
#if COLUMNS == 1
                    load_matrices(sum_row + prob_offset, p[0], p[2]);
#else
                    load_matrices(sum_row + prob_offset + k * 2 * CORE_ROW, p[0], p[1], p[2], p[3]);
#endif
                    mma_f16(sums, p, 0x3c003c00u, 0x3c003c00u);
                }
                right = operand(probs + prob_offset);
                u32 v[OWN_TILES][WARPS][4];
#pragma unroll
                for (int own = 0; own < OWN_TILES; ++own) {
                    int index = (own * WARPS + warp) * TOKEN_TILES + step * WARPS;
                    Words<4> word = load_shared<4>(v_part + (index / 4 * 32 + lane) * 16);
                    Words<4> low =
                        load_shared<4>(v_part + V_BYTES + (index / 4 * 32 + lane) * 16);
#pragma unroll
                    for (int row = 0; row < WARPS; ++row) {
                        u32 (&x)[4] = v[own][row];
                        restore(word.w[row], low.w[row], x);
#if LOG4
                        uint4 m = reinterpret_cast<uint4*>(v_meta)[own * 8 + g];
                        x[0] = scaled(x[0], m.x, m.y);
                        x[1] = scaled(x[1], m.z, m.w);
                        x[2] = scaled(x[2], m.x, m.y);
                        x[3] = scaled(x[3], m.z, m.w);
#else
                        uint4 m = reinterpret_cast<uint4*>(v_meta)[row * 4 + t];
                        x[0] = scaled(x[0], m.x, m.z);
                        x[1] = scaled(x[1], m.x, m.z);
                        x[2] = scaled(x[2], m.y, m.w);
                        x[3] = scaled(x[3], m.y, m.w);
#endif
                    }
                    warpgroup_begin();
#pragma unroll
                    for (int row = 0; row < WARPS; ++row)
                        warpgroup_mma(result[own], v[own][row], right + (row * 2 * CORE_ROW >> 4),
                                      true);
                    warpgroup_commit();
                }
            }
        }
        warpgroup_wait();
        sequence += 2 * count;

        __syncthreads();
        if (t == 0) {
            stats[warp % SHARES * COLS + sum_column] = sums[0];
            if (COLUMNS > 1) stats[warp % SHARES * COLS + sum_column + 8] = sums[2];
        }
        __syncthreads();
        bool whole = count == num_pages;
        i64 part = (2 * (i64)worker + (is_first ? 0 : 1)) * COLS;
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                int c = column * 8 + 2 * t + j;
                if (c >= s.num_columns) continue;
                float x = 0.0f;
#pragma unroll
                for (int w = 0; w < SHARES; ++w) x += stats[w * COLS + c];
                i64 row = out_row(s, c, num_kv_heads);
                float inverse = whole ? 1.0f / x : 1.0f;
#pragma unroll
                for (int own = 0; own < OWN_TILES; ++own)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int channel = (own * WARPS + warp) * 16 + half * 8 + g;
                        float y = result[own][column][2 * half + j] * inverse;
                        if (whole) store_output(out, row * HEAD_DIM + channel, y);
                        else __stcg(partial_out + (part + c) * HEAD_DIM + channel, y);
                    }
                if (warp == 0 && g == 0) {
                    if (whole) {
                        lse[row] = tops[c] + log2f(x);
                    } else {
                        __stcg(partial_stat + (part + c) * 2, tops[c]);
                        __stcg(partial_stat + (part + c) * 2 + 1, x);
                    }
                }
            }
        if (!whole) {
            i64 first_page = begin - page;
            int first = worker_of(first_page, total, workers);
            int last = worker_of(first_page + num_pages - 1, total, workers);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                int* counter =
                    arrived + ((i64)s.b * num_kv_heads + s.head) * max_blocks + s.block;
                *flags = atomicAdd(counter, 1) == last - first;
                if (*flags) *counter = 0;
            }
            __syncthreads();
            if (*flags) {
                __threadfence();
                int first_slot = first_unit(total, first, workers) < first_page ? 1 : 0;
                merge_parts(partial_out, partial_stat, first, last, first_slot, s, num_kv_heads, out,
                            lse);
            }
        }
        begin += count;
        is_first = false;
        __syncthreads();
    }

    // Queries of requests without pages, and rows of no request, belong to no block's share.
    auto clear = [&](int token) {
        i64 row = (i64)token * num_kv_heads * GROUP;
        for (int i = threadIdx.x; i < num_kv_heads * GROUP * HEAD_DIM; i += THREADS)
            store_output(out, row * HEAD_DIM + i, 0.0f);
        for (int i = threadIdx.x; i < num_kv_heads * GROUP; i += THREADS) lse[row + i] = NEG_INF;
    };
    for (int b = blockIdx.x; b < batch; b += gridDim.x)
        if (indptr[b] == indptr[b + 1])
            for (int token = qo_indptr[b]; token < qo_indptr[b + 1]; ++token) clear(token);
    for (int token = qo_indptr[batch] + blockIdx.x; token < num_tokens; token += gridDim.x)
        clear(token);
}
