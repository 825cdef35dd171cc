// x [rows, inputs] times weight^T on Hopper, in bf16 with sums in fp32.
//
// A program stays on a multiprocessor and takes tiles of 64 * GROUPS rows of x by TILE of the
// weight's: one warp loads steps of 64 inputs of both into a ring in shared memory, and one
// warpgroup for each 64 rows of x multiplies. TILE is a multiple of 8 (16 where outputs are gated),
// so that the tiles fill all multiprocessors about equally; blocks of a Triton kernel are powers of
// two.
//
// An output's inputs are added up in order, 16 to a matrix instruction, those of each share by
// themselves. So do matmul.py and large_matmul.py: results are theirs to the bit.
//
// Whoever compiles this puts before it GROUPS, TILE, STAGES (steps that the ring holds), GATED,
// LARGEST and SHARES, and in place of the line MULTIPLY what depends on TILE (product.py).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct __align__(64) TensorMap { u64 opaque[16]; };

constexpr u32 STEP = 64;  // Inputs: 128 bytes, what the swizzle of shared memory spans.
constexpr u32 ROWS = 64 * GROUPS;
constexpr u32 X_BYTES = ROWS * STEP * 2, STAGE_BYTES = X_BYTES + TILE * STEP * 2;
constexpr u32 THREADS = 128 * GROUPS + 32;
constexpr u32 HALVES = GATED ? 2 : 1;
constexpr u32 WIDTH = TILE / HALVES;  // Outputs of a tile.

// MULTIPLY

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

// Arrive, and have the barrier wait for so many bytes of copies.
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra AGAIN;\n"
        "DONE:\n"
        "}" ::"r"(bar), "r"(parity)
        : "memory");
}

// A box of the matrix behind `map`, zeros where it has ended, to shared memory at `place`.
__device__ __forceinline__ void load(u32 place, const TensorMap* map, u32 column, u32 row,
                                     u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(place), "l"(map), "r"(column), "r"(row), "r"(bar)
        : "memory");
}

// A step from input `low` of the tile whose first output is `first`: of both halves if gated.
__device__ __forceinline__ void load_weight(u32 place, const TensorMap* map, u32 low, u32 first,
                                            u32 outputs, u32 bar) {
    for (u32 half = 0; half < HALVES; half++)
        load(place + half * WIDTH * STEP * 2, map, low, first + half * outputs, bar);
}

// Rows of 128 swizzled bytes in shared memory, as matrix instructions are told of them.
__device__ __forceinline__ u64 rows_descriptor(u32 place) {
    return (u64)((place & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ float round_bf16(float x) {
    u16 rounded;
    float wide;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    asm("mov.b32 %0, {0, %1};" : "=f"(wide) : "h"(rounded));
    return wide;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// activation.silu_times, with the instructions that Triton makes of it.
__device__ __forceinline__ float silu_times(float gate, float up) {
    float power, activated;
    gate = round_bf16(gate);
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-gate, 1.4426950408889634f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(activated) : "f"(gate), "f"(__fadd_rn(1.0f, power)));
    return __fmul_rn(round_bf16(activated), round_bf16(up));
}

// Two neighbours of a tile's gated outputs, of a lane's sums.
__device__ __forceinline__ u32 gated_pair(const float* gate) {
    const float* up = gate + WIDTH / 2;
    return pack_bf16(silu_times(gate[0], up[0]), silu_times(gate[1], up[1]));
}

// Lane i of a quad has column i of 4 x 4 words; it gets row i.
__device__ __forceinline__ uint4 transpose(u32 a, u32 b, u32 c, u32 d, u32 lane) {
    bool odd = lane & 1, high = lane & 2;
    u32 ab = __shfl_xor_sync(~0u, odd ? a : b, 1), cd = __shfl_xor_sync(~0u, odd ? c : d, 1);
    u32 even_low = odd ? ab : a, odd_low = odd ? b : ab;
    u32 even_high = odd ? cd : c, odd_high = odd ? d : cd;
    u32 first = __shfl_xor_sync(~0u, high ? even_low : even_high, 2);
    u32 second = __shfl_xor_sync(~0u, high ? odd_low : odd_high, 2);
    return high ? make_uint4(first, second, even_high, odd_high)
                : make_uint4(even_low, odd_low, first, second);
}

// Where the sums of some rows go, of which else only the largest are wanted: logits [rows, outputs]
// of those whose slot has a `use` other than 0. Null: nowhere.
struct Kept {
    float* logits;
    const long long *slots, *use;
};

// A lane's sums of a row: of every 8 outputs two neighbours.
__device__ __forceinline__ void write_sums(const float* sums, float* y, u32 row, u32 first,
                                           u32 outputs, u32 lane) {
    float* out = y + (u64)row * outputs + first + lane % 4 * 2;
#pragma unroll
    for (u32 block = 0; block < WIDTH / 8; block++) {
        const float* pair = sums + block * 4;
        if (first + block * 8 < outputs)
            *(float2*)(out + block * 8) = make_float2(pair[0], pair[1]);
    }
}

#if LARGEST
// The largest of a row's sums in a tile, which output it is, the lowest of equals, and, if anybody
// asks, the sum of all sums' exponentials, divided by its own.
__device__ __forceinline__ void write_largest(const float* sums, float* y, int* indices,
                                              float* totals, const Kept& kept, u32 row, u32 rows,
                                              u32 first, u32 outputs, u32 lane) {
    if (kept.logits != nullptr && row < rows && kept.use[max(kept.slots[row], 0ll)] != 0)
        write_sums(sums, kept.logits, row, first, outputs, lane);
    u32 tiles = (outputs + WIDTH - 1) / WIDTH, own = first + lane % 4 * 2;
    u64 place = (u64)row * tiles + first / WIDTH;
    float best = sums[0];
    u32 index = own;
#pragma unroll
    for (u32 column = 0; column < WIDTH / 4; column++) {
        float sum = sums[column / 2 * 4 + column % 2];
        if (first + column / 2 * 8 < outputs && sum > best)
            best = sum, index = own + column / 2 * 8 + column % 2;
    }
    // Four lanes share a row.
#pragma unroll
    for (u32 other = 1; other < 4; other *= 2) {
        float more = __shfl_xor_sync(~0u, best, other);
        u32 there = __shfl_xor_sync(~0u, index, other);
        if (more > best || (more == best && there < index)) best = more, index = there;
    }
    if (row < rows && lane % 4 == 0) y[place] = best, indices[place] = index;
    if (totals == nullptr) return;
    float total = 0.0f;
#pragma unroll
    for (u32 column = 0; column < WIDTH / 4; column++) {
        float power;
        asm("ex2.approx.ftz.f32 %0, %1;"
            : "=f"(power)
            : "f"((sums[column / 2 * 4 + column % 2] - best) * 1.4426950408889634f));
        if (first + column / 2 * 8 < outputs) total += power;
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (row < rows && lane % 4 == 0) totals[place] = total;
}
#endif

// Write a lane's sums of a tile: of every 8 outputs two neighbours, in `row` and 8 rows below.
__device__ __forceinline__ void write(const float (&sums)[TILE / 2], void* y, int* indices,
                                      float* totals, const Kept& kept, u32 row, u32 rows,
                                      u32 first, u32 outputs, u32 lane) {
#pragma unroll
    for (u32 below = 0; below < 2; below++, row += 8) {
#if LARGEST
        write_largest(&sums[below * 2], (float*)y, indices, totals, kept, row, rows, first,
                      outputs, lane);
#elif GATED
        u32* out = (u32*)y + ((u64)row * outputs + first) / 2;
        // A pair is little for a store: of four blocks, each lane of a quad writes one.
#pragma unroll
        for (u32 block = 0; block + 4 <= WIDTH / 8; block += 4) {
            const float* four = &sums[block * 4 + below * 2];
            uint4 own = transpose(gated_pair(four), gated_pair(four + 4), gated_pair(four + 8),
                                  gated_pair(four + 12), lane);
            u32 number = block + lane % 4;
            if (row < rows && first + number * 8 < outputs) *(uint4*)(out + number * 4) = own;
        }
#pragma unroll
        for (u32 block = WIDTH / 32 * 4; block < WIDTH / 8; block++) {
            u32 pair = gated_pair(&sums[block * 4 + below * 2]);
            if (row < rows && first + block * 8 < outputs) out[block * 4 + lane % 4] = pair;
        }
#else
        if (row >= rows) break;
        write_sums(&sums[below * 2], (float*)y, row, first, outputs, lane);
#endif
    }
}

// x_map: boxes of STEP inputs of ROWS rows; w_map: of WIDTH rows. y [rows, outputs]: if GATED
// SiLU(gate) * up of the weight's halves in bf16, else the sums. If LARGEST: y, indices and, unless
// null, totals [rows, tiles], as write_largest has them, and sums where `kept` says. If there are
// several SHARES of so many inputs, y [SHARES, rows, outputs] are their sums. outputs, inputs:
// multiples of 8; share: of STEP.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
product_kernel(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
               void* y, int* indices, float* totals, Kept kept, u32 rows, u32 outputs, u32 inputs,
               u32 share) {
    extern __shared__ unsigned char memory[];
    // The swizzle repeats every 1,024 bytes.
    u32 ring = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    u32 full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    // By a shuffle, for the compiler to know that it is the same for all lanes.
    u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    // Tiles of the same outputs are neighbours: the weight is read from memory once.
    u32 down = (rows + ROWS - 1) / ROWS, tiles = down * ((outputs + WIDTH - 1) / WIDTH);
    if (SHARES == 1) share = inputs;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, 4 * GROUPS);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    }
    __syncthreads();

    if (warp == 4 * GROUPS) {
        if (lane != 0) return;
        // Weights are older than the kernel ahead: their first steps need not wait for its end.
        u32 ahead = 0, start = blockIdx.x / tiles * share;
        for (; ahead < STAGES && ahead * STEP < min(share, inputs - start); ahead++) {
            u32 place = ring + ahead * STAGE_BYTES, bar = full + 8 * ahead;
            barrier_expect(bar, STAGE_BYTES);
            load_weight(place + X_BYTES, &w_map, start + ahead * STEP,
                        blockIdx.x % tiles / down * WIDTH, outputs, bar);
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
        u32 stage = 0, parity = 1;
        for (u32 unit = blockIdx.x; unit < tiles * SHARES; unit += gridDim.x) {
            u32 tile = unit % tiles, first = tile / down * WIDTH, row = tile % down * ROWS;
            u32 low = unit / tiles * share, high = min(low + share, inputs);
            for (; low < high; low += STEP) {
                u32 place = ring + stage * STAGE_BYTES, bar = full + 8 * stage;
                if (ahead > 0) {
                    ahead--;
                } else {
                    barrier_wait(empty + 8 * stage, parity);
                    barrier_expect(bar, STAGE_BYTES);
                    load_weight(place + X_BYTES, &w_map, low, first, outputs, bar);
                }
                load(place, &x_map, low, row, bar);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // Its programs find no room beside these, and begin wherever one has ended.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    u32 stage = 0, parity = 0, group = warp / 4;
    u64 x = rows_descriptor(ring + group * 64 * STEP * 2), w = rows_descriptor(ring + X_BYTES);
    for (u32 unit = blockIdx.x; unit < tiles * SHARES; unit += gridDim.x) {
        u32 tile = unit % tiles, number = unit / tiles;
        u32 first = tile / down * WIDTH, row = tile % down * ROWS + group * 64;
        u32 start = number * share, high = min(start + share, inputs);
        float sums[TILE / 2];
        for (u32 low = start; low < high; low += STEP) {
            barrier_wait(full + 8 * stage, parity);
            u64 step = stage * (u64)(STAGE_BYTES / 16);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (u32 part = 0; part < 4; part++)
                multiply(sums, x + step + 2 * part, w + step + 2 * part, low > start || part > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // Meanwhile other warpgroups multiply. If it waited for the step before only, ptxas
            // would have some plans wait for every instruction.
            await_products(sums);
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        void* own = SHARES == 1 ? y : (float*)y + (u64)number * rows * outputs;
        write(sums, own, indices, totals, kept, row + warp % 4 * 16 + lane / 4, rows, first,
              outputs, lane);
    }
}
