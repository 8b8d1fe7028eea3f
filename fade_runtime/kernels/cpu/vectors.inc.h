/* Vectors and numbers: sums over lanes, float16 and bytes as floats, exponentials, the Hadamard rotation.
 *
 * Static functions of attend.c, the one translation unit, which includes each .inc.h once. Vectors are GNU C's portable
 * ones: over tokens and head dims as wide as the processor's (LANES), over parts of a head dim and groups of values,
 * which may be small, 8 floats (NARROW).
 */
#include <float.h>
#include <math.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define BLOCK 4         /* queries, and tokens, that share loads */
#define FLOAT 32        /* "bits" of what is no code */
#define NARROW 8
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define inlined static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef float narrow __attribute__((vector_size(NARROW * 4)));
typedef int32_t narrow_ints __attribute__((vector_size(NARROW * 4)));
typedef float quad __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(NARROW)));

/* Bring a line of memory, if there is one, into the second level of the cache. */
inlined void prefetch(const void *at) { __builtin_prefetch(at, 0, 2); }

inlined vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

inlined void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

inlined narrow load_narrow(const float *from) {
    narrow v;
    memcpy(&v, from, sizeof v);
    return v;
}

inlined void store_narrow(float *to, narrow v) { memcpy(to, &v, sizeof v); }

inlined narrow_ints widen(const uint8_t *from) {
#ifdef __AVX2__ /* one instruction, where the portable form takes twenty */
    return (narrow_ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    bytes c;
    memcpy(&c, from, sizeof c);
    return __builtin_convertvector(c, narrow_ints);
#endif
}

/* Sums over the lanes of four vectors. */
inlined quad lane_sums(narrow a, narrow b, narrow c, narrow d) {
#ifdef __AVX2__
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
    return (quad)_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
    quad result = {0, 0, 0, 0};
    for (int i = 0; i < NARROW; i++) result += (quad){a[i], b[i], c[i], d[i]};
    return result;
#endif
}

inlined narrow halves(vec v) {
    narrow half[2] = {{0}, {0}};
    memcpy(half, &v, sizeof v);
    return half[0] + half[1];
}

inlined float lane_sum(vec v) {
    const narrow all = halves(v);
    return lane_sums(all, all, all, all)[0];
}

/* A scale says with its sign bit that it and what stands beside it are bfloat16, where float16 does not reach. */
inlined int is_wide(uint16_t scale) { return scale > 0x8000; }

inlined float from_bfloat16(uint16_t bits) {
    const uint32_t whole = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &whole, sizeof x);
    return x;
}

/* Float16 to float32; no infinities, no NaN. */
static void from_float16(const uint16_t *restrict from, int64_t count, float *restrict to) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + LANES <= count; i += LANES)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
#elif defined __F16C__
    for (; i + LANES <= count; i += LANES)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < count; i++) {
        const uint32_t bits = (uint32_t)(from[i] & 0x8000) << 16 | (uint32_t)(from[i] & 0x7fff) << 13;
        memcpy(to + i, &bits, sizeof bits);
        to[i] *= 0x1p112f; /* the difference of the exponents' biases */
    }
}

/* to[i] = step * from[i] + least, count a multiple of NARROW. */
static void affine_bytes(const uint8_t *from, int64_t count, float step, float least, float *to) {
    int64_t i = 0;
#ifdef __AVX512F__ /* what is read in whole vectors is best written so */
    for (; i + LANES <= count; i += LANES) {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
        store(to + i, (vec)_mm512_cvtepi32_ps(codes) * step + least);
    }
#endif
    for (; i < count; i += NARROW)
        store_narrow(to + i, __builtin_convertvector(widen(from + i), narrow) * step + least);
}

/* The larger of two; b where a is NaN. */
inlined vec larger(vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined __AVX2__
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const ints more = a > b;
    return (vec)(((ints)a & more) | ((ints)b & ~more));
#endif
}

/* exp(x) for x <= 0: 2^k * 2^f, f in [-1/2, 1/2], relative error below 3e-7; 0 below 2^-126.5. */
inlined vec exp_negative(vec x) {
    const vec y = larger((vec){0} - 127.0f, x * 1.44269504088896341f); /* NaN stays */
    const vec magic = (vec){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const vec shifted = y + magic, f = y - (shifted - magic);
    vec p = (vec){0} + 1.5403530393381609e-4f;
    p = p * f + 1.3333558146428443e-3f;
    p = p * f + 9.6181291076284772e-3f;
    p = p * f + 5.5504108664821580e-2f;
    p = p * f + 2.4022650695910072e-1f;
    p = p * f + 6.9314718055994531e-1f;
    p = p * f + 1.0f;
    return p * (vec)(((ints)shifted << 23) + (127 << 23)); /* the integer is in the lowest bits; -127 gives 0 */
}

inlined float exp_one(float x) { return exp_negative((vec){0} + x)[0]; }

/* Rotate by the orthonormal Hadamard matrix, in blocks of the largest power of two that divides dim. */
static void hadamard(float *x, int64_t dim) {
    const int64_t power = dim & -dim;
    const float norm = 1.0f / sqrtf((float)power);
    for (float *block = x; block < x + dim; block += power) {
        for (int64_t half = 1; half < power; half *= 2)
            for (int64_t i = 0; i < power; i += 2 * half)
                for (int64_t j = i; j < i + half; j++) {
                    const float a = block[j], b = block[j + half];
                    block[j] = a + b, block[j + half] = a - b;
                }
        for (int64_t i = 0; i < power; i++) block[i] *= norm;
    }
}
