// Attention of several query tokens a request over anchors with 4-bit corrections (the int8
// target), for Hopper. A block of 4 warps takes 64 tokens of KV at a time. Each warp restores 16
// tokens of K in registers and multiplies them with all queries (wgmma). Then it restores a quarter
// of V's channels and multiplies them with all probabilities. Only queries and probabilities pass
// through shared memory, and a block restores each value once. Blocks share the pages of all
// requests, KV heads and column blocks (GROUP x tokens, 8 COLUMNS at a time), by their units of
// work.
//
// Values are fp16: K and V = x s + z, where x is the exact 8-bit code (uniform4: / 16), and s and z
// belong to a channel or token. Products give scores minus the running maxima: the maxima are
// integers and form one more channel of K and Q. A maximum moves only if probabilities grow too
// large. Queries see every token of encoded pages. Causality matters only in the tail, whose
// full-precision pages follow a request's encoded pages.
//
// With CHUNK_PAGES the bits of a row depend only on its query and on the KV that it sees. Chunks of
// CHUNK_PAGES pages, counted from the request's first token, are then attended to on their own, and
// verify_join.cu merges them in order. A column's maximum moves by that column's scores alone.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM PAGE_SIZE (multiples of 64) GROUP COLUMNS K_ROWS
// V_ROWS LOG4 ANCHOR_BITS Q_BF16 HALVES BLOCKS K_BYTES V_BYTES RECORD_BYTES RESIDUAL_BYTES MAX_BATCH
// JOIN_SEPARATELY CHUNK_PAGES (0: blocks share units) and TOP.

#include "verify_merge.cuh"
#include "verify_restore.cuh"
#include "verify_softmax.cuh"
#include "verify_tail.cuh"
#include "verify_wgmma.cuh"

constexpr int WARPS = 4, THREADS = 128;
// Neighbouring channel tiles of V that a warp has.
constexpr int OWN_TILES = CHANNEL_TILES / WARPS;
// Tiles whose codes are loaded at once. 8 tiles of 2-bit codes fill a load of 16 bytes. For K,
// uniform4 has no registers for 8 tiles if there are 8 columns.
constexpr bool SPARES_REGISTERS = LOG4 || COLUMNS < 8;
constexpr int K_LOAD = ANCHOR_BITS == 2 && CHANNEL_TILES % 8 == 0 && SPARES_REGISTERS ? 8 : 4;
constexpr int V_LOAD = ANCHOR_BITS == 2 && TOKEN_TILES == 4 && OWN_TILES % 2 == 0 ? 8 : 4;
// Pages whose ids are in shared memory: those in the ring, and two that are being looked up.
constexpr int AHEAD = HALVES / 2 + 2;
// Cost of beginning and ending a segment of pages, in units: 12 or 6 of the widest pages, but at
// most 1 / SEGMENT_PART of a block's work. Measured over 32K tokens.
constexpr int SEGMENT_UNITS = (PASSES > 1 ? 12 : 6) * WIDEST_UNITS;
constexpr int SEGMENT_PART = PASSES > 1 ? 4 : 16;
constexpr int STEPS = TOKEN_TILES / STEP_TILES;
// Vectors of 8 query values of a thread. Short runs spend most time on fetching instructions, so
// loops are unrolled only as far as that hides a latency.
constexpr int QUERY_VECTORS = (COLUMNS * HEAD_DIM + THREADS - 1) / THREADS;
constexpr int QUERY_UNROLL = QUERY_VECTORS < 8 ? QUERY_VECTORS : 8;

static_assert(!CHUNK_PAGES || JOIN_SEPARATELY);
constexpr int QUERY_BYTES = CHANNEL_TILES * COLUMNS * 256 + COLUMNS * 128;
constexpr int PROB_BYTES = WARPS * COLUMNS * 256;
constexpr int META_BYTES = WARPS * CHANNEL_TILES * 64;
constexpr int V_META_BYTES = WARPS * (OWN_TILES * 8 > 16 ? OWN_TILES * 8 : 16) * 16;
static_assert(HALVES % 2 == 0);
constexpr int STAT_BYTES = 2 * COLS * 4;
// Statistics share the memory of K's metadata.
static_assert(META_BYTES >= WARPS * PASS_COLUMNS * 32 && META_BYTES >= 2 * COLS * 4);
// Probabilities of a pass are summed in tiles of 16 columns and 16 tokens. SUM_TILES: tiles of a
// warp. SHARES: warps that share 16 columns.
constexpr int SUM_TILES = COLUMNS > 1 ? PASS_COLUMNS / 2 : 1, SHARES = WARPS / SUM_TILES;

// Loads 8 values of q as fp16, times the scale.
__device__ __forceinline__ void load_scaled(
    u32 (&x)[4], const u16* q, float scale, bool aligned) {
    if (aligned) {
        uint4 pairs = *reinterpret_cast<const uint4*>(q);
        x[0] = pairs.x, x[1] = pairs.y, x[2] = pairs.z, x[3] = pairs.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = *reinterpret_cast<const u32*>(q + 2 * i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if Q_BF16
        float low = low_bf16(x[i]), high = high_bf16(x[i]);
#else
        float low = half_to_float((u16)x[i]), high = half_to_float((u16)(x[i] >> 16));
#endif
        x[i] = to_half2(low * scale, high * scale);
    }
}

template <bool TAIL> struct Kind { static constexpr bool IN_TAIL = TAIL; };  // kind of a page

// q, out: [num_tokens, num_kv_heads * GROUP, HEAD_DIM]; lse: [num_tokens, num_kv_heads * GROUP],
// base 2. partial_out: [2 * grid, COLS, HEAD_DIM], partial_stat: [2 * grid, COLS, 2] (max, sum);
// with CHUNK_PAGES [items, item_rows, HEAD_DIM] and [items, item_rows, 2].
// arrived: [batch * num_kv_heads * max_blocks], zero before and after. shares: [batch + 2], for
// verify_join.cu, which must follow if JOIN_SEPARATELY. Otherwise the last block of a segment joins the
// parts of all its blocks.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) verify_attention(
    const u16* __restrict__ q, i64 q_stride, i64 q_head_stride, const u8* __restrict__ anchors,
    i64 page_stride, const u8* __restrict__ residuals, i64 slot_stride,
    const int* __restrict__ residual_slots, const int* __restrict__ qo_indptr,
    const int* __restrict__ indptr, const int* __restrict__ indices,
    const int* __restrict__ last_page_len, Tail tail, int batch, int num_tokens, int num_kv_heads,
    int max_blocks, int item_rows, float scale_log2, float* __restrict__ partial_out,
    float* __restrict__ partial_stat, int* __restrict__ arrived, int* __restrict__ shares,
    void* __restrict__ out, float* __restrict__ lse) {
    extern __shared__ __align__(128) u8 memory[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int g = lane >> 2, t = lane & 3;
    // The parts of the tops are 8 more channels of the query. A product takes 16 channels; the
    // other 8 are multiplied by zero.
    u8* top_parts = memory;
    u8* query = memory + CORE_ROW;
    // Two buffers: some warps may store probabilities of the next step while others still read.
    u8* probs = memory + QUERY_BYTES;
    // Start of the lane's column of this warp's tokens: 8 tokens, the other 8, the next columns.
    u32 prob_column = shared_address(probs) + (2 * warp + (lane >> 3 & 1)) * CORE_ROW +
                      (lane >> 4) * 128 + (lane & 7) * 16;
    u32 sum_row = shared_address(probs) +
                  (warp * SUM_TILES % WARPS * 2 + (COLUMNS > 1 ? lane >> 4 : lane >> 3)) * CORE_ROW +
                  (warp * SUM_TILES / WARPS * 2 + (COLUMNS > 1 ? lane >> 3 & 1 : 0)) * 128 +
                  (lane & 7) * 16;
    int first_own = warp * OWN_TILES;
    int sum_column = warp * SUM_TILES / WARPS * 16 + g;
    // Weights of the parts of the tops, as a left operand: 32768, 32 and 1 for all tokens.
    u32 weights = t == 0 ? 0x50007800u : t == 1 ? 0x00003c00u : 0;
    const u32 top_weights[4] = {weights, weights, 0, 0};
    uint4* k_meta = reinterpret_cast<uint4*>(memory + QUERY_BYTES + 2 * PROB_BYTES) +
                    warp * CHANNEL_TILES * 4;
    u8* after = memory + QUERY_BYTES + 2 * PROB_BYTES + META_BYTES;
    uint2* v_meta = reinterpret_cast<uint2*>(after) + warp * (V_META_BYTES / WARPS / 8);
    // [WARPS][8 PASS_COLUMNS], for one pass. Takes the place of K's metadata after its last use.
    float* stats = reinterpret_cast<float*>(memory + QUERY_BYTES + 2 * PROB_BYTES);
    float* rises = reinterpret_cast<float*>(after + V_META_BYTES);  // [COLS]: growth of tops
    float* tops = rises + COLS;  // [COLS]: the running maxima, integers; 0 at first
    u8* ring = after + V_META_BYTES + STAT_BYTES;
    u32 barrier = shared_address(ring + HALVES / 2 * PAGE_BYTES);
    int* flags = reinterpret_cast<int*>(ring + HALVES / 2 * PAGE_BYTES + HALVES * 8);
    int* ids = flags + 4;         // [AHEAD]: page ids
    int* slots = ids + AHEAD;     // [AHEAD]: slots of their residuals
    int* rests = slots + AHEAD;  // units of a segment in addition to those of its pages
    int* starts = rests + 1;     // [MAX_BATCH + 1]: units before each request

    if (threadIdx.x == 0) {
        for (int i = 0; i < HALVES; ++i) barrier_init(barrier + 8 * i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    auto pages_of = [&](int b) {
        int tokens = tail.lens ? tail.lens[b] : 0;
        return indptr[b + 1] - indptr[b] + (tokens + PAGE_SIZE - 1) / PAGE_SIZE;
    };
    // Computes the units before each request, and returns all units; with CHUNK_PAGES items instead
    // of units. Each segment counts `rest` units, the cost of starting it, in addition to the units
    // of its pages.
    auto scan = [&](int rest) {
        int before = 0;
#pragma unroll 1
        for (int first = 0; first < batch; first += 32) {
            int b = first + lane, units = 0;
            if (b < batch) {
                int queries = qo_indptr[b + 1] - qo_indptr[b], num_pages = pages_of(b);
                if (num_pages > 0 && queries > 0)
                    units = num_kv_heads * (CHUNK_PAGES
                        ? HeadItems(queries * GROUP, num_pages).all
                        : HeadUnits(queries * GROUP, num_pages, rest).all);
            }
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(FULL, units, step);
                if (lane >= step) units += other;
            }
            if (b < batch) starts[b + 1] = before + units;
            before += __shfl_sync(FULL, units, 31);
        }
        return before;
    };
    if (warp == 0) {
        int rest = 0;
        // Scan again with the cost of starting a segment, if it is not 0.
#pragma unroll 1
        for (bool again = false;; again = true) {
            int units = scan(rest);
            if (CHUNK_PAGES) break;
            if (!again) rest = min(units / (int)gridDim.x / SEGMENT_PART, SEGMENT_UNITS);
            if (again || rest == 0) break;
        }
        if (lane == 0) {
            starts[0] = 0;
            *rests = rest;
        }
    }
    __syncthreads();

    int rest = *rests;
    int total = starts[batch];
#if JOIN_SEPARATELY
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < batch + 2; i += THREADS) shares[i] = rests[i];
#endif
#if CHUNK_PAGES
    int begin = blockIdx.x, end = total;
#else
    int workers = num_workers(total, gridDim.x);
    int worker = blockIdx.x;
    int begin = 0, end = 0;
    if (worker < workers) {
        begin = (int)first_unit(total, worker, workers);
        end = (int)first_unit(total, worker + 1, workers);
    }
#endif
    bool q_aligned = ((u64)q | q_stride * 2 | q_head_stride * 2) % 16 == 0;
    u32 sequence = 0, prob_offset = 0;

    while (begin < end) {
        Segment s;
        s.b = request_of(starts, batch, begin);
        int first_index = indptr[s.b], past_pages = indptr[s.b + 1] - first_index;
        int num_pages = pages_of(s.b);
        s.first_query = qo_indptr[s.b];
        s.num_queries = qo_indptr[s.b + 1] - s.first_query;
#if CHUNK_PAGES
        HeadItems items(s.num_queries * GROUP, num_pages);
        int within = begin - starts[s.b], in_head = within % items.all;
        s.head = within / items.all;
        s.block = in_head / items.chunks;
        s.num_columns = min(COLS, s.num_queries * GROUP - s.block * COLS);
        int page = in_head % items.chunks * CHUNK_PAGES;
        int count = min(num_pages - page, CHUNK_PAGES);
        i64 part = (i64)begin * item_rows;
        begin += gridDim.x;
#else
        HeadUnits units(s.num_queries * GROUP, num_pages, rest);
        int within = begin - starts[s.b], in_head = within % units.all;
        s.head = within / units.all;
        s.block = in_head / units.wide;
        s.num_columns = min(COLS, s.num_queries * GROUP - s.block * COLS);
        int segment_begin = begin - (in_head - s.block * units.wide);
        // A page belongs to the block that has its first unit.
        int each = page_units(s.num_columns), first_page = segment_begin + rest;
        int page = max((begin - first_page + each - 1) / each, 0);
        int count = min(num_pages, (end - first_page + each - 1) / each) - page;
        begin = first_page + num_pages * each;
        if (count <= 0) continue;
        bool is_first = first_unit(total, worker, workers) >= segment_begin;
        i64 part = (2 * (i64)worker + (is_first ? 0 : 1)) * COLS;
#endif
        // The first `encoded` pages are encoded; the others are in the tail.
        int encoded = max(min(count, past_pages - page), 0);
        int last_len = page + encoded == past_pages ? last_page_len[s.b] : PAGE_SIZE;
        const int* pages = indices + first_index + page;

        if (warp == 0) {
            if (lane < min(encoded, AHEAD)) {
                ids[lane] = pages[lane];
                slots[lane] = residual_slots[pages[lane]];
            }
            __syncwarp();
        }
        auto fetch = [&](int n) {
            if (n / 2 >= encoded) return;
            u32 slot = (sequence + n) % HALVES;
            const u8* anchor = anchors + ids[n / 2 % AHEAD] * page_stride +
                               (i64)s.head * RECORD_BYTES;
            const u8* residual = residuals + slots[n / 2 % AHEAD] * slot_stride +
                                 (i64)s.head * RESIDUAL_BYTES;
            fetch_half(shared_address(ring) + half_offset(slot), anchor, residual, n & 1,
                       barrier + 8 * slot);
        };
        // Look up a page well before its fetch, and its residual one page later: no cache holds
        // their entries.
        auto look_up = [&](int p) {
            if (p < encoded) copy_word(ids + p % AHEAD, pages + p);
            if (p - 1 < encoded)
                copy_word(slots + (p - 1) % AHEAD, residual_slots + ids[(p - 1) % AHEAD]);
        };
        if (warp == 0 && elect()) {
#pragma unroll 1
            for (int n = 0; n < HALVES; ++n) fetch(n);
        }

#pragma unroll QUERY_UNROLL
        for (int i = threadIdx.x; i < COLS * HEAD_DIM / 8; i += THREADS) {
            int c = i % COLS, eight = i / COLS, global = s.block * COLS + c;
            u32 x[4] = {};
            if (c < s.num_columns) {
                const u16* row = q + (i64)(s.first_query + global / GROUP) * q_stride +
                                 (i64)(s.head * GROUP + global % GROUP) * q_head_stride;
                load_scaled(x, row + eight * 8, scale_log2, q_aligned);
            }
            *reinterpret_cast<uint4*>(query + eight * CORE_ROW + c * 16) =
                make_uint4(x[0], x[1], x[2], x[3]);
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < COLS; i += THREADS) {
            tops[i] = 0.0f;
            reinterpret_cast<uint4*>(top_parts)[i] = make_uint4(0, 0, 0, 0);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        float sums[PASSES][4] = {}, result[OWN_TILES][COLUMNS][4];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
            for (int own = 0; own < OWN_TILES; ++own)
                for (int i = 0; i < 4; ++i) result[own][column][i] = 0.0f;
        __syncthreads();

        auto attend = [&](int i, auto kind) {
            constexpr bool IN_TAIL = decltype(kind)::IN_TAIL;
            u32 k_slot = (sequence + 2 * i) % HALVES, v_slot = (sequence + 2 * i + 1) % HALVES;
            const u8* k_part = ring + half_offset(k_slot);
            const u8* v_part = ring + half_offset(v_slot);
            int valid = i + 1 == encoded ? last_len : PAGE_SIZE, tail_page = page + i - past_pages;
            if constexpr (IN_TAIL) {
                valid = min(PAGE_SIZE, tail.lens[s.b] - tail_page * PAGE_SIZE);
            } else {
                barrier_wait(barrier + 8 * k_slot, (sequence + 2 * i) / HALVES & 1);
            }
#if LOG4
            int v_base = IN_TAIL ? 0 : *reinterpret_cast<const short*>(k_part + 2);
#else
            int v_base = 0;
#endif
#pragma unroll 1
            for (int step = 0; step < STEPS; ++step) {
                int row_tile = step * WARPS + warp;
                __syncwarp();
                if constexpr (!IN_TAIL) convert_k(k_meta, k_part, row_tile, lane);
                __syncwarp();
                u32 a[CHANNEL_TILES][4];
                Words<K_LOAD> k_codes;
                prob_offset ^= PROB_BYTES;
#pragma unroll
                for (int pass = 0; pass < PASSES; ++pass) {
                    constexpr int PASS_BYTES = PASS_COLUMNS * 128;
                    // Memory of columns without a query is never read.
                    if (pass > 0 && s.num_columns <= pass * PASS_COLUMNS * 8) break;
                    float scores[PASS_COLUMNS][4];  // minus the tops
                    u64 right = operand(query + pass * PASS_BYTES);
                    u64 top_right = operand(top_parts + pass * PASS_BYTES);
                    if (pass > 0) {
                        warpgroup_begin();
                        warpgroup_mma(scores, top_weights, top_right, false);
#pragma unroll
                        for (int k = 0; k < CHANNEL_TILES; ++k)
                            warpgroup_mma(scores, a[k], right + (k * 2 * CORE_ROW >> 4), true);
                        warpgroup_commit();
                    }
#pragma unroll
                    for (int tile = 0; tile < (pass == 0 ? CHANNEL_TILES : 0); tile += 4) {
                        int index = row_tile * CHANNEL_TILES + tile;
                        Words<4> low;
                        if constexpr (!IN_TAIL) {
                            const u8* k_low = k_part + K_BYTES + (index / 4 * 32 + lane) * 16;
                            if (tile % K_LOAD == 0)
                                k_codes = load_codes<K_LOAD>(k_part + K_CODES, k_part + K_REST,
                                                             index, lane);
                            low = load_shared<4>(k_low);
                        }
                        if (tile == 0) {
                            // Wait for the last step's products with V: none may be in flight from
                            // here on.
                            warpgroup_wait();
                            warpgroup_begin();
                            warpgroup_mma(scores, top_weights, top_right, false);
                        }
                        if constexpr (IN_TAIL) {
                            load_tail_k(a + tile, tail, s.b, s.head, tail_page, row_tile, tile,
                                        lane);
                        } else {
#pragma unroll
                            for (int k = 0; k < 4; ++k) {
                                u32 (&x)[4] = a[tile + k];
                                restore(k_codes.w[tile % K_LOAD + k], low.w[k], x);
                                uint4 m = k_meta[(tile + k) * 4 + t];
                                x[0] = scaled(x[0], m.x, m.y);
                                x[1] = scaled(x[1], m.x, m.y);
                                x[2] = scaled(x[2], m.z, m.w);
                                x[3] = scaled(x[3], m.z, m.w);
                            }
                        }
                        warpgroup_begin();
#pragma unroll
                        for (int k = tile; k < tile + 4; ++k)
                            warpgroup_mma(scores, a[k], right + (k * 2 * CORE_ROW >> 4), true);
                        warpgroup_commit();
                    }
                    warpgroup_wait();
                    if (IN_TAIL || valid < PAGE_SIZE) {
                        int token = row_tile * 16 + g;
                        int first = s.block * COLS + pass * PASS_COLUMNS * 8 + 2 * t, all_see = 0;
                        if constexpr (IN_TAIL)
                            all_see = tail.lens[s.b] - tail_page * PAGE_SIZE - s.num_queries + 1;
#pragma unroll
                        for (int column = 0; column < PASS_COLUMNS; ++column)
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                int query = (first + column * 8 + (j & 1)) / GROUP;
                                int seen = IN_TAIL ? min(valid, all_see + query) : valid;
                                if (token + (j >> 1) * 8 >= seen) scores[column][j] = NEG_INF;
                            }
                    }
                    u32 largest = 0;
                    auto weigh = [&]() {
                        u32 target = prob_column + prob_offset + pass * PASS_BYTES;
#if COLUMNS == 1
                        u32 low = weights_of(scores[0][0], scores[0][1]);
                        u32 high = weights_of(scores[0][2], scores[0][3]);
                        largest = max_u16x2(low, high);
                        store_transposed(target, low, high);
#else
#pragma unroll
                        for (int c = 0; c < PASS_COLUMNS; c += 2) {
                            u32 p[4];
#pragma unroll
                            for (int k = 0; k < 4; ++k)
                                p[k] = weights_of(scores[c + k / 2][k % 2 * 2],
                                                  scores[c + k / 2][k % 2 * 2 + 1]);
                            largest = max_u16x2(max_u16x2(largest, p[0]), p[1]);
                            largest = max_u16x2(max_u16x2(largest, p[2]), p[3]);
                            store_transposed(target + c * 128, p[0], p[1], p[2], p[3]);
                        }
#endif
                        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    };
                    weigh();
                    if (!IN_TAIL && pass == 0) {
                        if (step == 0)
                            barrier_wait(barrier + 8 * v_slot,
                                         (sequence + 2 * i + 1) / HALVES & 1);
                        convert_v<OWN_TILES>(v_meta, v_part, v_base, step, valid, first_own, lane);
                    }
                    bool is_first_step = i == 0 && step == 0;
                    // The sum carries into the highest bit of a half from LARGEST_PROB on.
                    bool grew = (largest + (0x8000 - LARGEST_PROB) * 0x10001 & 0x80008000u) != 0;
                    // Past this point all warps have stored their probabilities of this pass, and
                    // none reads this K, the last step's probabilities or the last step's V.
                    if (!__syncthreads_or(is_first_step || grew)) continue;
#pragma unroll
                    for (int column = 0; column < PASS_COLUMNS; ++column)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            float m = fmaxf(scores[column][j], scores[column][j + 2]);
                            for (int hop = 4; hop < 32; hop *= 2)
                                m = fmaxf(m, __shfl_xor_sync(FULL, m, hop));
                            if (g == 0) stats[warp * PASS_COLUMNS * 8 + column * 8 + 2 * t + j] = m;
                        }
                    __syncthreads();
                    if (threadIdx.x < PASS_COLUMNS * 8) {
                        int within = threadIdx.x, c = pass * PASS_COLUMNS * 8 + within;
                        float m = stats[within];
#pragma unroll
                        for (int w = 1; w < WARPS; ++w)
                            m = fmaxf(m, stats[w * PASS_COLUMNS * 8 + within]);
                        // A query may see no token of the tail.
                        float least = is_first_step && m > NEG_INF ? m : 0.0f;
                        float rise = rintf(fmaxf(m, least));
#if CHUNK_PAGES
                        // Other columns may have grown too large, but not this one.
                        if (!is_first_step && weights_of(m, NEG_INF) < LARGEST_PROB) rise = 0.0f;
#endif
                        rises[c] = rise;
                        tops[c] += rise;
                        store_top(top_parts + c * 16, tops[c]);
                    }
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    __syncthreads();
                    // Sums and results are 0 before the first step, and must stay so for any rise.
                    auto shrink = [&](int c) {
                        return is_first_step ? 0.0f : exp2_approx(-rises[c]);
                    };
#pragma unroll
                    for (int column = 0; column < PASS_COLUMNS; ++column)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            int all = pass * PASS_COLUMNS + column, c = all * 8 + 2 * t + j;
                            scores[column][j] -= rises[c];
                            scores[column][j + 2] -= rises[c];
#pragma unroll
                            for (int own = 0; own < OWN_TILES; ++own) {
                                result[own][all][j] *= shrink(c);
                                result[own][all][j + 2] *= shrink(c);
                            }
                        }
                    int c = pass * PASS_COLUMNS * 8 + sum_column;
                    sums[pass][0] *= shrink(c);
                    if (COLUMNS > 1) sums[pass][2] *= shrink(c + 8);
                    weigh();
                    __syncthreads();
                }
                if (!IN_TAIL && warp == 0 && elect()) {
                    if (step == 0) {
                        copies_wait();
                        if (i > 0) fetch(2 * i - 1 + HALVES);
                        look_up(i + AHEAD);
                    }
                    if (step == STEPS - 1) fetch(2 * i + HALVES);
                }
#pragma unroll
                for (int k = 0; k < SUM_TILES * PASSES; ++k) {
                    u32 p[4] = {}, tile = sum_row + prob_offset + k / SUM_TILES * PASS_COLUMNS * 128;
#if COLUMNS == 1
                    load_matrices(tile, p[0], p[2]);
#else
                    load_matrices(tile + k % SUM_TILES * 2 * CORE_ROW, p[0], p[1], p[2], p[3]);
#endif
                    mma_f16(sums[k / SUM_TILES], p, 0x3c003c00u, 0x3c003c00u);
                }
                u64 right = operand(probs + prob_offset);
                u32 v[OWN_TILES][STEP_TILES][4];
                Words<V_LOAD> v_codes;
#pragma unroll
                for (int own = 0; own < OWN_TILES; ++own) {
                    int tile = first_own + own;
                    if constexpr (IN_TAIL) {
                        load_tail_v(v[own], tail, s.b, s.head, tail_page, tile, step * STEP_TILES,
                                    valid, lane);
                    } else {
                        int index = tile * TOKEN_TILES + step * STEP_TILES;
                        if (own * STEP_TILES % V_LOAD == 0)
                            v_codes = load_codes<V_LOAD>(v_part, v_part + V_REST, index, lane);
                        Words<4> low =
                            load_shared<4>(v_part + V_BYTES + (index / 4 * 32 + lane) * 16);
#pragma unroll
                        for (int row = 0; row < STEP_TILES; ++row) {
                            u32 (&x)[4] = v[own][row];
                            restore(v_codes.w[own * STEP_TILES % V_LOAD + row], low.w[row], x);
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
                    }
                    warpgroup_begin();
#pragma unroll
                    for (int row = 0; row < STEP_TILES; ++row)
                        warpgroup_mma(result[own], v[own][row], right + (row * 2 * CORE_ROW >> 4),
                                      true);
                    warpgroup_commit();
                }
            }
        };
#pragma unroll 1
        for (int i = 0; i < encoded; ++i) attend(i, Kind<false>());
#pragma unroll 1
        for (int i = encoded; i < count; ++i) attend(i, Kind<true>());
        warpgroup_wait();
        sequence += 2 * encoded;

        __syncthreads();
        if (t == 0) {
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                float* sum = stats + warp % SHARES * COLS + pass * PASS_COLUMNS * 8 + sum_column;
                sum[0] = sums[pass][0];
                if (COLUMNS > 1) sum[8] = sums[pass][2];
            }
        }
        __syncthreads();
        bool whole = count == num_pages;
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
                // As verify_join.cu divides, so that chunks after the first change nothing.
                float divisor = CHUNK_PAGES && whole && x > 0.0f ? x : 1.0f;
                float inverse = CHUNK_PAGES || !whole ? 1.0f : x > 0.0f ? 1.0f / x : 0.0f;
#pragma unroll
                for (int own = 0; own < OWN_TILES; ++own)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int channel = (first_own + own) * 16 + half * 8 + g;
                        float y = result[own][column][2 * half + j] * inverse;
                        if (CHUNK_PAGES) y /= divisor;
                        if (whole) store_output(out, row * HEAD_DIM + channel, y);
                        else __stcg(partial_out + (part + c) * HEAD_DIM + channel, y);
                    }
                if (warp == 0 && g == 0) {
                    if (whole) {
                        lse[row] = tops[c] + log2f(x);
                    } else {
                        // If the block saw no token, its maximum must not scale down other parts.
                        __stcg(partial_stat + (part + c) * 2, x > 0.0f ? tops[c] : NEG_INF);
                        __stcg(partial_stat + (part + c) * 2 + 1, x);
                    }
                }
            }
#if !JOIN_SEPARATELY
        if (!whole) {
            Owners owners(segment_begin, rest, num_pages, each, total, workers);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                int* counter =
                    arrived + ((i64)s.b * num_kv_heads + s.head) * max_blocks + s.block;
                *flags = atomicAdd(counter, 1) == owners.last - owners.first;
                if (*flags) *counter = 0;
            }
            __syncthreads();
            if (*flags) {
                __threadfence();
                merge_parts<THREADS>(partial_out, partial_stat, owners, s, num_kv_heads, stats,
                                     out, lse);
            }
        }
#endif
        __syncthreads();
    }

    // No block's share includes queries of requests without tokens, or rows of no request.
    auto clear = [&](int token) {
        i64 row = (i64)token * num_kv_heads * GROUP;
#pragma unroll 1
        for (int i = threadIdx.x; i < num_kv_heads * GROUP * HEAD_DIM; i += THREADS)
            store_output(out, row * HEAD_DIM + i, 0.0f);
#pragma unroll 1
        for (int i = threadIdx.x; i < num_kv_heads * GROUP; i += THREADS) lse[row + i] = NEG_INF;
    };
#pragma unroll 1
    for (int b = blockIdx.x; b < batch; b += gridDim.x)
        if (pages_of(b) == 0)
#pragma unroll 1
            for (int token = qo_indptr[b]; token < qo_indptr[b + 1]; ++token) clear(token);
#pragma unroll 1
    for (int token = qo_indptr[batch] + blockIdx.x; token < num_tokens; token += gridDim.x)
        clear(token);
}
