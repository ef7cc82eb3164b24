// Hopper instructions that the kernels share, and the division of work among blocks. Needs the
// define Q_BF16.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 FULL = 0xffffffffu;
#define NEG_INF __int_as_float(0xff800000)

template <int N> struct Words { u32 w[N]; };

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

// Returns (a & b) | c in one instruction.
__device__ __forceinline__ u32 and_or(u32 a, u32 b, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// Returns (a & mask) | (b & ~mask) in one instruction.
__device__ __forceinline__ u32 select(u32 mask, u32 a, u32 b) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
    return r;
}

__device__ __forceinline__ u32 half2_add(u32 a, u32 b) {
    u32 r;
    asm("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Returns the maxima of pairs of unsigned 16-bit integers. Works for non-negative fp16 numbers too.
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
    u32 r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 half2_mul(u32 a, u32 b) {
    u32 r;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

__device__ __forceinline__ u32 to_half2(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float half_to_float(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}

// Returns the fp32 value of a number in the dtype of q.
__device__ __forceinline__ float value_of(u16 x) {
#if Q_BF16
    return low_bf16(x);
#else
    return half_to_float(x);
#endif
}

__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Stores 8 x 8 matrices transposed, as columns of 16 bytes. A lane holds columns 2t, 2t+1 of row g
// of each matrix. Lane 8 i + c gives the address of column c of matrix i.
__device__ __forceinline__ void store_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address),
                 "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Loads 8 x 8 matrices of 16-byte rows. Lane 8 i + r gives the address of row r of matrix i. A lane
// receives columns 2t, 2t+1 of row g of each matrix.
__device__ __forceinline__ void load_matrices(u32 address, u32& a, u32& b) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(a), "=r"(b) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}

__device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The left operand is in bf16, the right operand in the dtype of q.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const Words<4>& a, u32 b0, u32 b1) {
#if Q_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b0), "r"(b1));
#else
    // The values of an fp16 model, and so their centres and zeros, are in the range of fp16.
    u32 half[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) half[i] = to_half2(low_bf16(a.w[i]), high_bf16(a.w[i]));
    mma_f16(c, half, b0, b1);
#endif
}

template <int N>
__device__ __forceinline__ Words<N> load_shared(const u8* p) {
    Words<N> r;
    if constexpr (N == 4) {
        uint4 v = *reinterpret_cast<const uint4*>(p);
        r.w[0] = v.x; r.w[1] = v.y; r.w[2] = v.z; r.w[3] = v.w;
    } else if constexpr (N == 2) {
        uint2 v = *reinterpret_cast<const uint2*>(p);
        r.w[0] = v.x; r.w[1] = v.y;
    } else {
        r.w[0] = *reinterpret_cast<const u32*>(p);
    }
    return r;
}

__device__ __forceinline__ void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
}

// Initialises the `count` barriers of a warp's ring. The whole warp must call it.
__device__ __forceinline__ void init_ring(u32 barrier, int count, int lane) {
    if (lane == 0) {
        for (int i = 0; i < count; ++i) barrier_init(barrier + 8 * i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncwarp();
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra READY;\nbra WAIT;\nREADY:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// Announces bytes to a barrier, which opens when they have arrived. One lane calls this and
// copy_bulk.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 target, const u8* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Copies a word asynchronously. The same thread may read it after copies_wait().
__device__ __forceinline__ void copy_word(int* target, const int* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)),
                 "l"(source) : "memory");
}

__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Returns true in one lane of the warp, always the same one. All lanes must call it.
__device__ __forceinline__ bool elect() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(elected));
    return elected;
}

__device__ __forceinline__ void store_output(void* out, i64 index, float x) {
#if Q_BF16
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
    reinterpret_cast<u16*>(out)[index] = bits;
}

// `total` units of work are cut into equal runs. first_unit returns the first unit of a worker,
// worker_of the worker of a unit.
__device__ __forceinline__ i64 first_unit(i64 total, int worker, int workers) {
    // This is total * worker / workers, without a product that needs 64 bits.
    int each = (int)total / workers, left = (int)total % workers;
    return each * worker + left * worker / workers;
}

__device__ __forceinline__ int worker_of(i64 unit, i64 total, int workers) {
    return (int)(((unit + 1) * workers - 1) / total);
}

// Returns the largest b with starts[b] <= unit. The whole warp must call it.
__device__ __forceinline__ int request_of(const int* starts, int batch, int unit) {
    int b = 0;
#pragma unroll 1
    for (int first = 1; first < batch; first += 32) {
        int i = first + threadIdx.x % 32;
        b += __popc(__ballot_sync(FULL, i < batch && starts[i] <= unit));
    }
    return b;
}
