// Products of a warpgroup's 64 rows with 8 COLUMNS columns at once (wgmma). Needs the define COLUMNS.
#pragma once
#include "hopper.cuh"

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
