// Places of the full-precision tokens after a request's encoded pages.
#pragma once
#include "hopper.cuh"

// The Tail of ops/attention_plan.py. Strides of a page, a token and a head count elements. lens is
// null if no request has such tokens.
struct Tail {
    const u16 *k, *v;
    i64 k_page, k_token, k_head, v_page, v_token, v_head;
    const int *indptr, *indices, *lens;
};
