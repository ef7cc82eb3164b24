// Multiplies a few rows by a weight in 4 bits: out = x @ weight.T + bias. See
// ops/int4_products.py for the order of a packed weight.
//
// The weight is the left operand of m16n8k16, and goes from memory to registers: 16 bytes of a
// column are the codes of 8 inputs of each of 4 groups, so the words of two columns are the operands
// of 4 instructions for each group. The order of inputs in a product is free, and rows are read
// alike: lane 4 g + t has inputs 8 t to 8 t + 7 and 32 + 8 t to 32 + 8 t + 7 of a group. Columns
// 2 g and 2 g + 1 of 16 are rows g and g + 8 of the instruction, so their results lie side by side.
// Rows come through shared memory for all warps of a block, a chunk of 256 inputs a stage.
//
// 0x4300 | u is 128 + u in bf16. What a group adds is scaled in fp32,
//
//     sum x (u s + z) = s sum x (128 + u) + (z - 128 s) sum x,
//
// and a product with ones adds up x, once for all warps.
//
// Compiled by jit/nvrtc.py, which defines: ROW_TILES STRIPS WARPS STAGES BLOCKS and Q_BF16.

#include "hopper.cuh"

constexpr int PLANES = 4, GROUP = 64, CHUNK = PLANES * GROUP;
constexpr int ROWS = 8 * ROW_TILES, COLUMNS = 16 * STRIPS * WARPS, THREADS = 32 * WARPS;
// 8 lanes read two rows at a time, from different banks.
constexpr int ROW_BYTES = 2 * CHUNK + 64;
constexpr int STAGE_BYTES = ROWS * ROW_BYTES;
constexpr int PIECES = CHUNK / 8;
constexpr u32 CODES = 0x000F000F, BF16_1 = 0x3F803F80, BF16_128 = 0x43004300;

// Codes of a lane's two columns in a chunk, the lower and the upper half of each, and the scales
// and zeros of its groups.
struct Strip {
    Words<4> words[4];
    Words<2> affine[PLANES];
};

__device__ __forceinline__ void load_strip(Strip& strip, const u16* words, const u32* affine,
                                           int chunk, int column, int num_columns, int t) {
    const u16* from = words + ((i64)chunk * num_columns + column) * GROUP + 8 * t;
    // Volatile: these loads stay ahead of the products of the chunk before.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32(&w)[4] = strip.words[i].w;
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from + GROUP / 2 * i));
    }
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
        const u32* pair = affine + ((i64)chunk * PLANES + p) * num_columns + column;
        u32(&w)[2] = strip.affine[p].w;
        asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(pair));
    }
}

// Copies 16 bytes asynchronously, or writes zeros.
__device__ __forceinline__ void copy_piece(u32 target, const u16* source, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void stages_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Copies a chunk of all rows. Rows and inputs that do not exist become zeros.
__device__ __forceinline__ void copy_rows(u32 stage, const u16* x, i64 stride, int num_rows,
                                          int depth, int chunk) {
#pragma unroll
    for (int i = 0; i < (ROWS * PIECES + THREADS - 1) / THREADS; ++i) {
        int place = i * THREADS + threadIdx.x, row = place / PIECES, piece = place % PIECES;
        if (ROWS * PIECES % THREADS != 0 && row >= ROWS) break;
        int k = chunk * CHUNK + 8 * piece;
        bool exists = row < num_rows && k < depth;
        copy_piece(stage + row * ROW_BYTES + 16 * piece, exists ? x + row * stride + k : x, exists);
    }
}

// Adds up the inputs of every group and row of a stage, each warp some. sums: [PLANES][ROWS].
__device__ __forceinline__ void add_up(float* sums, const u8* rows, int warp, int lane) {
    const Words<4> ones = {BF16_1, BF16_1, BF16_1, BF16_1};
#pragma unroll
    for (int i = 0; i < (PLANES * ROW_TILES + WARPS - 1) / WARPS; ++i) {
        int n = (i * WARPS + warp) / PLANES, plane = (i * WARPS + warp) % PLANES;
        if (PLANES * ROW_TILES % WARPS != 0 && n >= ROW_TILES) break;
        const u8* from = rows + 8 * n * ROW_BYTES + 2 * GROUP * plane;
        Words<4> x[2] = {load_shared<4>(from), load_shared<4>(from + GROUP)};
        float total[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            mma_bf16(total, ones, x[j / 2].w[j % 2 * 2], x[j / 2].w[j % 2 * 2 + 1]);
        float* to = sums + plane * ROWS + 8 * n + 2 * lane;
        if (lane < 4) *reinterpret_cast<float2*>(to) = make_float2(total[0], total[1]);
    }
}

// Adds a group of all strips' columns, PLANE of their words, to acc. sums: those of the stage,
// from the lane's first row on.
template <int PLANE>
__device__ __forceinline__ void add_group(float (&acc)[STRIPS][ROW_TILES][4],
                                          const Strip (&strips)[STRIPS], const u8* rows,
                                          const float* sums) {
    Words<4> weights[STRIPS][4];
    float scale[STRIPS][2], shift[STRIPS][2];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
        const u32(&affine)[2] = strips[s].affine[PLANE].w;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            // Registers of an instruction: both columns, then both columns' next inputs.
            int column = i / 8, pair = i % 8;
            weights[s][pair / 2].w[pair % 2 * 2 + column] =
                and_or(strips[s].words[i / 4].w[i % 4] >> 4 * PLANE, CODES, BF16_128);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            scale[s][c] = low_bf16(affine[c]);
            shift[s][c] = fmaf(-128.f, scale[s][c], high_bf16(affine[c]));
        }
    }
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) {
        const u8* from = rows + 8 * n * ROW_BYTES + 2 * GROUP * PLANE;
        Words<4> x[2] = {load_shared<4>(from), load_shared<4>(from + GROUP)};
        float raw[STRIPS][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
                mma_bf16(raw[s], weights[s][i], x[i / 2].w[i % 2 * 2], x[i / 2].w[i % 2 * 2 + 1]);
        float2 both = *reinterpret_cast<const float2*>(sums + PLANE * ROWS + 8 * n);
        const float total[2] = {both.x, both.y};
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& a = acc[s][n][i];
                a = fmaf(scale[s][i / 2], raw[s][i], fmaf(shift[s][i / 2], total[i % 2], a));
            }
    }
}

// x: [num_rows, depth], a row every `stride` values, at multiples of 16 bytes. num_rows is at most
// ROWS, num_columns even, depth a multiple of 8. words, affine: a packed weight. bias: [num_columns]
// or null. Writes out [num_rows, num_columns].
//
// Blocks share out the chunks of all tiles of COLUMNS columns, one tile after the other (Stream-K,
// Osama et al. 2023). Blocks of one tile leave partial sums, [2 * blocks][COLUMNS * ROWS]: a block
// that begins with the tile in its odd place, one that began before in its even place. The block
// that arrives last at a tile adds them in order, so the result does not depend on which one that
// is. It leaves the tile's count in `arrived` at zero again.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int4_product(
    const u16* __restrict__ x, const u16* __restrict__ words, const u32* __restrict__ affine,
    const u16* __restrict__ bias, u16* __restrict__ out, float4* __restrict__ partial,
    int* __restrict__ arrived, int num_rows, int num_columns, int depth, int num_chunks,
    i64 stride) {
    extern __shared__ __align__(16) u8 stages[];
    // Read and written in pairs.
    __shared__ __align__(16) float sums[2][PLANES * ROWS];
    __shared__ int num_before;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int block = blockIdx.x, blocks = gridDim.x;
    i64 total = (i64)((num_columns + COLUMNS - 1) / COLUMNS) * num_chunks;
    int item = (int)first_unit(total, block, blocks);
    int last = (int)first_unit(total, block + 1, blocks);
    const u8* rows = stages + g * ROW_BYTES + 16 * t;
    while (item < last) {
        int tile = item / num_chunks, tile_item = tile * num_chunks;
        int begin = item - tile_item, end = min(last - tile_item, num_chunks);
        item = tile_item + end;
        int first_column = tile * COLUMNS + warp * (16 * STRIPS) + 2 * g;
        int columns[STRIPS];
        // Columns past the end read the last ones again, and are not stored.
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) columns[s] = min(first_column + 16 * s, num_columns - 2);
        auto load = [&](Strip(&strips)[STRIPS], int chunk) {
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
                load_strip(strips[s], words, affine, chunk, columns[s], num_columns, t);
        };
        auto copy = [&](int stage, int chunk) {
            if (chunk < end)
                copy_rows(shared_address(stages) + stage * STAGE_BYTES, x, stride, num_rows, depth,
                          chunk);
            end_stage();
        };
        Strip even[STRIPS], odd[STRIPS];
        load(even, begin);
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) copy(i, begin + i);
        stages_wait<STAGES - 2>();
        __syncthreads();
        add_up(sums[0], rows, warp, lane);
        float acc[STRIPS][ROW_TILES][4] = {};
        int chunk = begin, stage = 0;
        // Adds a chunk, while the next one is loaded. The next one's rows are there, too.
        auto add_chunk = [&](const Strip(&now)[STRIPS], Strip(&next)[STRIPS], int parity) {
            if (chunk + 1 < end) load(next, chunk + 1);
            stages_wait<STAGES - 3>();
            // All warps have read the stage that is overwritten next.
            __syncthreads();
            copy(stage == 0 ? STAGES - 1 : stage - 1, chunk + STAGES - 1);
            const u8* from = rows + stage * STAGE_BYTES;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (chunk + 1 < end) add_up(sums[1 - parity], rows + stage * STAGE_BYTES, warp, lane);
            const float* own = sums[parity] + 2 * t;
            add_group<0>(acc, now, from, own);
            add_group<1>(acc, now, from, own);
            add_group<2>(acc, now, from, own);
            add_group<3>(acc, now, from, own);
            ++chunk;
        };
#pragma unroll 1
        while (true) {
            add_chunk(even, odd, 0);
            if (chunk == end) break;
            add_chunk(odd, even, 1);
            if (chunk == end) break;
        }
        // The next tile begins with the first stage again.
        __syncthreads();

        int first_block = worker_of(tile_item, total, blocks);
        int last_block = worker_of(tile_item + num_chunks - 1, total, blocks);
        if (first_block != last_block) {
            auto place_of = [&](int of) {
                i64 place = 2 * of + (of == first_block);
                return partial + (place * WARPS + warp) * (STRIPS * ROW_TILES * 32) + lane;
            };
            float4* own = place_of(block);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) {
                    float(&a)[4] = acc[s][n];
                    own[(s * ROW_TILES + n) * 32] = make_float4(a[0], a[1], a[2], a[3]);
                }
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                num_before = atomicAdd(arrived + tile, 1);
                __threadfence();
            }
            __syncthreads();
            bool is_last = num_before == last_block - first_block;
            // Nobody writes num_before again before all have read it.
            __syncthreads();
            if (!is_last) continue;
            if (threadIdx.x == 0) arrived[tile] = 0;
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[s][n][i] = 0;
#pragma unroll 2
            for (int of = first_block; of <= last_block; ++of) {
                const float4* part = place_of(of);
#pragma unroll
                for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                    for (int n = 0; n < ROW_TILES; ++n) {
                        // Past the L1 cache, which does not see other blocks' stores.
                        float4 sum = __ldcg(part + (s * ROW_TILES + n) * 32);
                        float(&a)[4] = acc[s][n];
                        a[0] += sum.x; a[1] += sum.y; a[2] += sum.z; a[3] += sum.w;
                    }
            }
        }
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
            int column = first_column + 16 * s;
            if (column >= num_columns) continue;
            u32 pair = bias == nullptr ? 0 : *reinterpret_cast<const u32*>(bias + column);
            float added[2] = {low_bf16(pair), high_bf16(pair)};
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int row = 8 * n + 2 * t + i;
                    if (row >= num_rows) continue;
                    u32 both;
                    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                        : "=r"(both)
                        : "f"(acc[s][n][2 + i] + added[1]), "f"(acc[s][n][i] + added[0]));
                    *reinterpret_cast<u32*>(out + (i64)row * num_columns + column) = both;
                }
        }
    }
}
