// Where the full-precision tokens after a request's encoded pages lie.
#pragma once
#include "hopper.cuh"

// As in ops/attention_plan.py. Strides count elements: of a page, a token and a head. lens is null
// where no request has such tokens.
struct Tail {
    const u16 *k, *v;
    i64 k_page, k_token, k_head, v_page, v_token, v_head;
    const int *indptr, *indices, *lens;
};
