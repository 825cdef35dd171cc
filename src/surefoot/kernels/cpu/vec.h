/* The thin vector layer: 16 lanes everywhere, so that layouts and summation orders are the same
 * on every instruction set. `vf` is 16 floats, `vi` 16 int32, `vw` 64 bytes (16 lanes of 4).
 *
 * Every multiply-add is an explicit vf_fma: the build passes -ffp-contract=off, so no path can
 * round differently from another because the compiler fused it.
 */
#ifndef SF_VEC_H
#define SF_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SF_INLINE static inline __attribute__((always_inline))
#define SF_LANES 16

/* IEEE half to float without hardware help; exact, subnormals included. */
SF_INLINE float sf_half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    uint32_t bits;
    float out;
    if (exponent == 0) {
        out = (float)fraction * 0x1p-24f;
        return sign ? -out : out;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
    memcpy(&out, &bits, 4);
    return out;
}

/* Round to nearest even, as torch does. */
SF_INLINE uint16_t sf_float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

SF_INLINE float sf_bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

#endif
