// Joins the parts of a query row that blocks of verify_attention.cu wrote. Used if the parts are so
// many that the last block would take long. Each query row has a block.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM GROUP COLUMNS CHUNK_PAGES JOIN_WARPS
// PARTS_AT_ONCE and Q_BF16.

#include "join_rows.cuh"
#include "verify_merge.cuh"

// shares: units of a segment in addition to its pages, then units before each request, as
// verify_attention wrote them. max_workers: blocks of that kernel. item_rows: as there. Writes a row
// of out and lse unless a single block of that kernel wrote it.
extern "C" __global__ void __launch_bounds__(JOIN_THREADS) verify_join(
    const float* __restrict__ partial_out, const float* __restrict__ partial_stat,
    const int* __restrict__ shares, const int* __restrict__ qo_indptr, int batch,
    int num_kv_heads, int max_workers, int item_rows, void* __restrict__ out,
    float* __restrict__ lse) {
    int num_heads = num_kv_heads * GROUP;
    int token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    if (token >= qo_indptr[batch]) return;
    int b = request_of(qo_indptr, batch, token);
    const int* starts = shares + 1;
    int rest = shares[0], total = starts[batch], units = starts[b + 1] - starts[b];
    if (units == 0) return;
    int first_query = qo_indptr[b], num_columns = (qo_indptr[b + 1] - first_query) * GROUP;
    int row = (token - first_query) * GROUP + head % GROUP, block = row / COLS;
    OtherState none = {nullptr, nullptr};
#if CHUNK_PAGES
    // Parts are those of the items, in the order of chunks. The order of the additions depends only
    // on a part's number, and a chunk that a row does not see adds nothing.
    int each = units / num_kv_heads, chunks = each / ((num_columns + COLS - 1) / COLS);
    if (chunks == 1) return;
    int first = starts[b] + head / GROUP * each + block * chunks;
    auto row_of = [&](int item) { return (i64)item * item_rows + row % COLS; };
    join_row(partial_out, partial_stat, first, first + chunks - 1, row_of, none, none, blockIdx.x,
             blockIdx.x, out, lse);
#else
    int num_pages = pages_of_units(num_columns, units / num_kv_heads, rest);
    HeadUnits units_of(num_columns, num_pages, rest);
    int begin = starts[b] + head / GROUP * units_of.all + block * units_of.wide;
    int each = page_units(min(COLS, num_columns - block * COLS));
    Owners owners(begin, rest, num_pages, each, total, num_workers(total, max_workers));
    if (owners.first == owners.last) return;
    auto row_of = [&](int worker) { return owners.row_of(worker) + row % COLS; };
    join_row(partial_out, partial_stat, owners.first, owners.last, row_of, none, none, blockIdx.x,
             blockIdx.x, out, lse);
#endif
}
