// First half of encode.cu, before codes are chosen: values in shared memory, and metadata of each
// channel or token, found by the lanes that load it. Needs the defines of encode.cu.
#pragma once
#include "pairs.cuh"
#if LOG4
#include "encode_log4.cuh"
#else
#include "encode_uniform4.cuh"
#endif

constexpr int THREADS = WARPS * 32;
constexpr int ROW_BYTES = HEAD_DIM * 2;
// With this pitch, columns of 16 bytes in 8 rows lie in different banks.
constexpr int PITCH = ROW_BYTES + 16;
constexpr bool WITH_STEPS = !LOG4 && !EXACT;

template <bool IS_V>
struct Part {
    // Tiles of the operand: K, or V transposed.
    static constexpr int ROW_TILES = (IS_V ? HEAD_DIM : PAGE_SIZE) / 16;
    static constexpr int COL_TILES = (IS_V ? PAGE_SIZE : HEAD_DIM) / 16;
    static constexpr int CHUNK = IS_V ? V_CHUNK : K_CHUNK;
    static constexpr bool BY_TOKEN = IS_V && !LOG4;
    static constexpr bool BY_ROW = IS_V && LOG4;
    static constexpr int CHUNKS = PAGE_SIZE / CHUNK;
    // Entries of metadata, and their bytes in a record.
    static constexpr int ENTRIES = BY_TOKEN ? PAGE_SIZE : CHUNKS * HEAD_DIM;
    static constexpr int IMAGE_BYTES = ENTRIES * (LOG4 ? 3 : 4);

    // In a task, a warp loads a chunk of 8 or 4 lanes' channels, 16 bytes a lane.
    static constexpr int COL_LANES = CHUNK == 32 && HEAD_DIM % 64 == 0 ? 8 : 4;
    static constexpr int ROW_LANES = 32 / COL_LANES;
    static constexpr int LOADS = CHUNK / ROW_LANES;
    static constexpr int COL_TASKS = HEAD_DIM / (8 * COL_LANES);
    static constexpr int TASKS = CHUNKS * COL_TASKS;
    static constexpr int TASK_ROUNDS = (TASKS + WARPS - 1) / WARPS;
    // Channels whose range a lane has at the end.
    static constexpr int LANE_CHANNELS = COL_LANES / 4;

    // Tiles that a warp encodes at once; they share metadata in one direction.
    static constexpr int UNIT_COLS = COL_TILES % 4 == 0 ? 4 : 2;
    static constexpr int UNIT_ROWS = BY_ROW && UNIT_COLS == 4 ? 1 : 2;
    static constexpr int UNITS = ROW_TILES / UNIT_ROWS * (COL_TILES / UNIT_COLS);
    static_assert(!BY_ROW || UNIT_COLS * 16 == CHUNK || CHUNK % (UNIT_COLS * 16) == 0);
    static_assert(IS_V || CHUNK % (UNIT_ROWS * 16) == 0);
};

constexpr int MAX_ENTRIES = Part<0>::ENTRIES > Part<1>::ENTRIES ? Part<0>::ENTRIES
                                                                : Part<1>::ENTRIES;

// Returns the slot of an entry. Lanes that have every eighth entry then store to different banks.
__device__ __forceinline__ constexpr int slot_of(int entry) { return entry + entry / 8; }

struct Shared {
    alignas(16) u8 values[PAGE_SIZE * PITCH];
    Prepared prepared[slot_of(MAX_ENTRIES)];
    // The metadata in the order of the record.
    alignas(16) u8 image[MAX_ENTRIES * (LOG4 ? 3 : 4)];
    float steps[WITH_STEPS ? MAX_ENTRIES : 1];
    int maxima[LOG4 ? WARPS : 1];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES is too small for Shared");

struct Range {
    u32 low[4], high[4];

    __device__ __forceinline__ void take(const uint4& v, bool first) {
        const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low[i] = first ? pairs[i] : pair_min(low[i], pairs[i]);
            high[i] = first ? pairs[i] : pair_max(high[i], pairs[i]);
        }
    }

    // Joins the ranges of two lanes; each lane keeps half of the pairs.
    template <int PAIRS>
    __device__ __forceinline__ void halve(int lanes) {
        bool upper = threadIdx.x & lanes;
#pragma unroll
        for (int i = 0; i < PAIRS / 2; i++) {
            u32 low_sent = upper ? low[i] : low[i + PAIRS / 2];
            u32 high_sent = upper ? high[i] : high[i + PAIRS / 2];
            u32 low_kept = upper ? low[i + PAIRS / 2] : low[i];
            u32 high_kept = upper ? high[i + PAIRS / 2] : high[i];
            low[i] = pair_min(low_kept, __shfl_xor_sync(FULL, low_sent, lanes));
            high[i] = pair_max(high_kept, __shfl_xor_sync(FULL, high_sent, lanes));
        }
    }
};

// Return the place of a column's or row's metadata in a record. tiles: tiles in that direction.
__device__ __forceinline__ int place_of_column(int i, int tiles) {
    return (i / 2 % 4 * tiles + i / 16) * 4 + i / 8 % 2 * 2 + i % 2;
}
__device__ __forceinline__ int place_of_row(int i, int tiles) {
    return (i % 8 * tiles + i / 16) * 2 + i / 8 % 2;
}

// Prepares an entry and stores its metadata. base: base of log4's scales. Returns true if the codes
// of the entry need a clamp.
template <bool IS_V>
__device__ __forceinline__ bool keep(Shared& shared, int entry, int place, Metadata found,
                                     int base) {
    u16* first = reinterpret_cast<u16*>(shared.image);
#if LOG4
    int scale = max(min(found.reach, LARGEST_SCALE), base);
    first[place] = (u16)(__float_as_uint(found.centre) >> 16);
    shared.image[Part<IS_V>::ENTRIES * 2 + place] = (u8)(scale - base);
    shared.prepared[slot_of(entry)] = prepared_of(found, scale);
    return KV_BF16 && found.reach > LARGEST_SCALE;
#else
    first[place] = (u16)(__float_as_uint(found.scale) >> 16);
    first[Part<IS_V>::ENTRIES + place] = (u16)(__float_as_uint(found.zero) >> 16);
    float step;
    shared.prepared[slot_of(entry)] = prepared_of(found, step);
    if constexpr (WITH_STEPS) shared.steps[entry] = step;
    return needs_clamp(found);
#endif
}

// Loads the part and prepares its metadata. Writes its raw bits if the target is exact, and the
// fields of the anchor record before its codes. Returns true if any codes need a clamp, which is
// rare.
template <bool IS_V>
__device__ __forceinline__ bool prepare(const u8* page, i64 stride_token, u8* anchor, u8* bits,
                                        Shared& shared) {
    using P = Part<IS_V>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int col = lane % P::COL_LANES;
    // 8 consecutive lanes must store to different banks. With 4 lanes a row, they take two rows
    // that are 4 apart.
    const int row = P::COL_LANES == 8 ? lane / 8 : lane / 4 % 2 * 4 + lane / 8;
    Metadata found[P::TASK_ROUNDS][P::LANE_CHANNELS];
    // First of the lane's channels after ranges are joined, out of the 8 that it loads.
    const int channel = col * 8 + (lane & 16 ? 4 : 0) + (lane & 8 ? 2 : 0) +
                        (P::COL_LANES == 4 && lane & 4 ? 1 : 0);
#pragma unroll
    for (int round = 0; round < P::TASK_ROUNDS; round++) {
        const int task = round * WARPS + warp;
        if (P::TASKS % WARPS && task >= P::TASKS) break;
        const int token = task / P::COL_TASKS * P::CHUNK + row;
        const int byte = (task % P::COL_TASKS * P::COL_LANES + col) * 16;
        const u8* source = page + token * stride_token + byte;
        uint4 values[P::LOADS];
#pragma unroll
        for (int i = 0; i < P::LOADS; i++)
            values[i] = load_once(source + i * P::ROW_LANES * stride_token);
        Range range;
#pragma unroll
        for (int i = 0; i < P::LOADS; i++) {
            const int at = token + i * P::ROW_LANES;
            *reinterpret_cast<uint4*>(shared.values + at * PITCH + byte) = values[i];
            if constexpr (EXACT)
                *reinterpret_cast<uint4*>(bits + at * ROW_BYTES + byte) = values[i];
            range.take(values[i], i == 0);
        }
        if constexpr (!P::BY_TOKEN) {
            range.template halve<4>(16);
            range.template halve<2>(8);
            u32 low = range.low[0], high = range.high[0];
            if constexpr (P::COL_LANES == 8) {
                found[round][0] = metadata_of(low_of(low), low_of(high));
                found[round][P::LANE_CHANNELS - 1] = metadata_of(high_of(low), high_of(high));
            } else {
                // The lower half takes the least value of one channel, the upper half the greatest.
                bool upper = lane & 4;
                u32 kept = prmt(low, high, upper ? 0x7632 : 0x5410);
                u32 sent = prmt(low, high, upper ? 0x5410 : 0x7632);
                u32 got = __shfl_xor_sync(FULL, sent, 4);
                found[round][0] =
                    metadata_of(low_of(pair_min(kept, got)), high_of(pair_max(kept, got)));
            }
        }
    }
    int base = 0;
    bool clamped = false;
#if LOG4
    int reach = 0;
#pragma unroll
    for (int round = 0; round < P::TASK_ROUNDS; round++)
        if (P::TASKS % WARPS == 0 || round * WARPS + warp < P::TASKS)
#pragma unroll
            for (int i = 0; i < P::LANE_CHANNELS; i++) reach = max(reach, found[round][i].reach);
    reach = __reduce_max_sync(FULL, reach);
    if (lane == 0) shared.maxima[warp] = reach;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) reach = max(reach, shared.maxima[i]);
    base = max(min(reach, LARGEST_SCALE) - LARGEST_OFFSET, 0);
    if (threadIdx.x == 0) {
        reinterpret_cast<u16*>(anchor)[IS_V] = (u16)base;
        if constexpr (!IS_V)
            for (int i = 1; i < 4; i++) reinterpret_cast<u32*>(anchor)[i] = 0;
    }
#endif
    if constexpr (P::BY_TOKEN) {
        __syncthreads();
        // Two lanes share a token; 8 neighbouring lanes read 8 rows.
        for (int i = threadIdx.x; i < 2 * PAGE_SIZE; i += THREADS) {
            const int token = i / 32 * 16 + lane % 16;
            const u8* half = shared.values + token * PITCH + lane / 16 * (ROW_BYTES / 2);
            Range range;
#pragma unroll
            for (int j = 0; j < ROW_BYTES / 32; j++)
                range.take(*reinterpret_cast<const uint4*>(half + 16 * j), j == 0);
            u32 low = pair_min(pair_min(range.low[0], range.low[1]),
                               pair_min(range.low[2], range.low[3]));
            u32 high = pair_max(pair_max(range.high[0], range.high[1]),
                                pair_max(range.high[2], range.high[3]));
            low = pair_min(low, __shfl_xor_sync(FULL, low, 16));
            high = pair_max(high, __shfl_xor_sync(FULL, high, 16));
            low = pair_min(low, prmt(low, low, 0x1032));
            high = pair_max(high, prmt(high, high, 0x1032));
            Metadata group = metadata_of(low_of(low), low_of(high));
            if (lane < 16)
                clamped |= keep<IS_V>(shared, token, place_of_row(token, PAGE_SIZE / 16), group, 0);
        }
    } else {
#pragma unroll
        for (int round = 0; round < P::TASK_ROUNDS; round++) {
            const int task = round * WARPS + warp;
            if (P::TASKS % WARPS && task >= P::TASKS) break;
#pragma unroll
            for (int i = 0; i < P::LANE_CHANNELS; i++) {
                const int c = task % P::COL_TASKS * 8 * P::COL_LANES + channel + i;
                const int chunk = task / P::COL_TASKS * HEAD_DIM;
                const int place = IS_V ? place_of_row(c, HEAD_DIM / 16)
                                       : place_of_column(c, HEAD_DIM / 16);
                clamped |= keep<IS_V>(shared, chunk + c, chunk + place, found[round][i], base);
            }
        }
    }
    return __syncthreads_or(clamped);
}
