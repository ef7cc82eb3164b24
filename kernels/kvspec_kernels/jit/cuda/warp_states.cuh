// States of a block's warps in shared memory, and their join into the block's state. Needs the
// defines HEAD_DIM WARPS Q_BF16.
#pragma once
#include "hopper.cuh"

template <int HEADS>
struct WarpStates {
    static constexpr int BYTES = WARPS * HEADS * (HEAD_DIM + 2) * 4;

    float *tops, *sums;  // [WARPS][HEADS]: maximum of scores, base 2, and sum of weights
    float* outs;         // [WARPS][HEADS][HEAD_DIM], sums of weighted V

    __device__ __forceinline__ explicit WarpStates(u8* memory)
        : tops(reinterpret_cast<float*>(memory)), sums(tops + WARPS * HEADS),
          outs(sums + WARPS * HEADS) {}

    // Calls write(head, channel, top, sum, value) of the block for all heads and channels. If no
    // warp had a token, top is -inf and the rest 0.
    template <class Write>
    __device__ __forceinline__ void join(Write write) const {
        for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += WARPS * 32) {
            int h = i / HEAD_DIM;
            float top = tops[h], sum = 0.0f, x = 0.0f;
#pragma unroll
            for (int w = 1; w < WARPS; ++w) top = fmaxf(top, tops[w * HEADS + h]);
            // -inf minus -inf would be NaN.
            float base = top == NEG_INF ? 0.0f : top;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                float weight = exp2_approx(tops[w * HEADS + h] - base);
                sum += weight * sums[w * HEADS + h];
                x += weight * outs[w * HEADS * HEAD_DIM + i];
            }
            write(h, i % HEAD_DIM, top, sum, x);
        }
    }
};
