// Products of a warpgroup's 64 rows with up to 128 columns at once (wgmma). Needs the define
// COLUMNS.
#pragma once
#include "hopper.cuh"

// d[column][4] (+)= a b for the block's 64 rows, 16 of each warp, and 8 columns for each of d's.
// The left operand is in registers, as for mma.m16n8k16. The right operand is [columns][16] in
// shared memory.
#define ACC(c) "+f"(d[c][0]), "+f"(d[c][1]), "+f"(d[c][2]), "+f"(d[c][3])
#define ACC4(c) ACC(c), ACC(c + 1), ACC(c + 2), ACC(c + 3)
#define WARPGROUP_MMA(N, SHAPE, D, A, B, ADDS, ...)                                              \
    __device__ __forceinline__ void warpgroup_mma(                                              \
        float (&d)[N][4], const u32 (&a)[4], u64 b, bool adds) {                                \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\n"                          \
                     "wgmma.mma_async.sync.aligned." SHAPE ".f32.f16.f16 {" D "}, {" A "}, " B  \
                     ", p, 1, 1, 0;\n}"                                                         \
                     : __VA_ARGS__                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)adds));      \
    }
#define D4 "%0,%1,%2,%3"
#define D8 D4 ",%4,%5,%6,%7"
#define D16 D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D32 D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D64                                                                                     \
    D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,"  \
        "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
WARPGROUP_MMA(1, "m64n8k16", D4, "%4,%5,%6,%7", "%8", "%9", ACC(0))
WARPGROUP_MMA(2, "m64n16k16", D8, "%8,%9,%10,%11", "%12", "%13", ACC(0), ACC(1))
WARPGROUP_MMA(4, "m64n32k16", D16, "%16,%17,%18,%19", "%20", "%21", ACC4(0))
WARPGROUP_MMA(8, "m64n64k16", D32, "%32,%33,%34,%35", "%36", "%37", ACC4(0), ACC4(4))
WARPGROUP_MMA(16, "m64n128k16", D64, "%64,%65,%66,%67", "%68", "%69", ACC4(0), ACC4(4), ACC4(8),
              ACC4(12))

__device__ __forceinline__ void warpgroup_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Right operands are core matrices of 8 columns x 8 (16 bytes a column). The matrices of all
// columns come first, then those of the next 8 of the inner dimension. A product takes two along
// it.
constexpr int CORE_ROW = COLUMNS * 128;
__device__ __forceinline__ u64 operand(const void* matrix) {
    return (u64)(shared_address(matrix) >> 4) | (u64)(CORE_ROW >> 4) << 16 | (u64)(128 >> 4) << 32;
}
