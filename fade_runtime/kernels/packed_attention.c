/* Attention of a few queries over packed tokens: one pass, online softmax, exact in float32.
 *
 * Compiled by fade_runtime/kernels/cpu.py at first use. The storage format is defined by fade_runtime/quant.py, the
 * meaning of every argument by `packed_attention` in fade_runtime/kernels/reference.py. One page (up to 64 tokens) is
 * unpacked at a time into a buffer that stays in the first-level cache. Vectors are GNU C's portable ones, 8 floats
 * wide; the head dim must be a multiple of 16.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define PAGE 64
#define LANES 8

typedef float vec __attribute__((vector_size(32)));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(32)));
typedef uint8_t bytes __attribute__((vector_size(8)));

static inline vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

static inline ints widen(const uint8_t *from) {
#ifdef __AVX2__ /* one instruction, where the portable form takes twenty */
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    bytes c;
    memcpy(&c, from, sizeof c);
    return __builtin_convertvector(c, ints);
#endif
}

static inline void to_float(const _Float16 *restrict from, int count, float *restrict to) {
    int i = 0;
#ifdef __F16C__
    for (; i + LANES <= count; i += LANES)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < count; i++) to[i] = (float)from[i];
}

static inline float lanes_sum(vec v) {
    quad low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (const char *)&v + sizeof low, sizeof high);
    low += high;
    return (low[0] + low[2]) + (low[1] + low[3]);
}

static inline float largest(const float *restrict line, int count, float high) {
    float best[LANES];
    for (int i = 0; i < LANES; i++) best[i] = high;
    int t = 0;
    for (; t + LANES <= count; t += LANES)
        for (int i = 0; i < LANES; i++) best[i] = line[t + i] > best[i] ? line[t + i] : best[i];
    for (; t < count; t++) best[0] = line[t] > best[0] ? line[t] : best[0];
    for (int i = 0; i < LANES; i++) high = best[i] > high ? best[i] : high;
    return high;
}

/* exp(x) for x <= 0 in a form that compilers vectorise: 2^k * 2^f, f in [-1/2, 1/2], relative error below 3e-7. */
static inline float exp_negative(float x) {
    float y = x * 1.44269504088896341f;
    y = y < -126.0f ? -126.0f : y;
    float k = floorf(y + 0.5f), f = y - k;
    float p = 1.5403530393381609e-4f;
    p = p * f + 1.3333558146428443e-3f;
    p = p * f + 9.6181291076284772e-3f;
    p = p * f + 5.5504108664821580e-2f;
    p = p * f + 2.4022650695910072e-1f;
    p = p * f + 6.9314718055994531e-1f;
    p = p * f + 1.0f;
    int32_t bits = ((int32_t)k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* Byte i of a token holds channel i in its low half and channel i + dim / 2 in its high half. */
static inline void unpack_page(const uint8_t *restrict codes, int tokens, int half, float *restrict tile) {
    for (int t = 0; t < tokens; t++, codes += half, tile += 2 * half)
        for (int i = 0; i < half; i += LANES) {
            const ints c = widen(codes + i);
            store(tile + i, __builtin_convertvector(c & 15, vec));
            store(tile + half + i, __builtin_convertvector(c >> 4, vec));
        }
}

/* line[q][t] = tile[t] . folded[q] + constant[q], for `count` queries (at most 4) and pairs of tokens that share loads. */
static inline __attribute__((always_inline)) void dots(const float *restrict tile, int tokens, int dim,
                                                       const float *restrict folded, const float *restrict constant,
                                                       const int count, float *restrict line) {
    for (int t = 0; t < tokens; t += 2) {
        const float *restrict one = tile + (size_t)t * dim, *restrict two = t + 1 < tokens ? one + dim : one;
        vec sum[4] = {{0}, {0}, {0}, {0}}, next[4] = {{0}, {0}, {0}, {0}};
        for (int d = 0; d < dim; d += LANES) {
            const vec key = load(one + d), other = load(two + d);
            for (int q = 0; q < count; q++) {
                const vec query = load(folded + q * dim + d);
                sum[q] += key * query;
                next[q] += other * query;
            }
        }
        for (int q = 0; q < count; q++) {
            line[q * PAGE + t] = lanes_sum(sum[q]) + constant[q];
            line[q * PAGE + t + 1] = lanes_sum(next[q]) + constant[q];
        }
    }
}

/* out[d] = out[d] * decay + constant + sum over t of weight[t] * tile[t][d], for `width` channels at `stride`. */
static inline void weigh(const float *restrict tile, int tokens, int stride, int width, const float *restrict weight,
                         float decay, float constant, float *restrict out) {
    int d = 0;
    for (; d + 8 * LANES <= width; d += 8 * LANES) {
        vec sum[8];
        for (int i = 0; i < 8; i++) sum[i] = load(out + d + i * LANES) * decay + constant;
        for (int t = 0; t < tokens; t++)
            for (int i = 0; i < 8; i++) sum[i] += weight[t] * load(tile + (size_t)t * stride + d + i * LANES);
        for (int i = 0; i < 8; i++) store(out + d + i * LANES, sum[i]);
    }
    for (; d < width; d++) {
        float sum = out[d] * decay + constant;
        for (int t = 0; t < tokens; t++) sum += weight[t] * tile[(size_t)t * stride + d];
        out[d] = sum;
    }
}

/* query [rows, queries, dim]; page_len, page_row [pages]; key_codes, value_codes [tokens, dim / 2];
 * key_scale, key_zero [pages, dim]; value_scale, value_zero [tokens, groups];
 * out [rows, queries, dim], lse [rows, queries], scores [tokens, queries]. Returns 0, or 1 without memory. */
int packed_attention(int rows, int queries, int dim, int groups, int pages, const float *restrict query,
                     const int32_t *restrict page_len, const int32_t *restrict page_row,
                     const uint8_t *restrict key_codes, const _Float16 *restrict key_scale,
                     const _Float16 *restrict key_zero, const uint8_t *restrict value_codes,
                     const _Float16 *restrict value_scale, const _Float16 *restrict value_zero,
                     float *restrict out, float *restrict lse, float *restrict scores) {
    const int half = dim / 2, width = dim / groups, all = rows * queries;
    float *work = malloc(sizeof(float) * ((size_t)(PAGE + 6) * dim + 4 + (2 + 2 * groups + queries) * PAGE + 2 * (size_t)all));
    if (!work) return 1;
    float *restrict tile = work, *restrict folded = tile + PAGE * dim, *restrict constant = folded + 4 * dim;
    float *restrict scale = constant + 4, *restrict zero = scale + dim; /* of a page's keys */
    float *restrict lines = zero + dim, *restrict probs = lines + PAGE * queries, *restrict weight = probs + PAGE;
    float *restrict scales = weight + PAGE, *restrict zeros = scales + PAGE * groups; /* of a page's values */
    float *restrict top = zeros + PAGE * groups, *restrict sum = top + all;
    for (int i = 0; i < all; i++) top[i] = -INFINITY, sum[i] = 0.0f;
    memset(out, 0, sizeof(float) * (size_t)all * dim);

    size_t token = 0;
    for (int p = 0; p < pages; token += page_len[p++]) {
        const int n = page_len[p];
        const size_t first = (size_t)page_row[p] * queries;
        to_float(key_scale + (size_t)p * dim, dim, scale);
        to_float(key_zero + (size_t)p * dim, dim, zero);
        to_float(value_scale + token * groups, n * groups, scales);
        to_float(value_zero + token * groups, n * groups, zeros);
        unpack_page(key_codes + token * half, n, half, tile);
        for (int q = 0; q < queries; q += 4) {
            const int count = queries - q < 4 ? queries - q : 4;
            for (int i = 0; i < count; i++) {
                const float *restrict mine = query + (first + q + i) * dim;
                float offset = 0.0f;
                for (int d = 0; d < dim; d++) {
                    folded[i * dim + d] = mine[d] * scale[d];
                    offset += mine[d] * zero[d];
                }
                constant[i] = offset;
            }
            switch (count) { /* a constant count keeps the sums in registers */
                case 1: dots(tile, n, dim, folded, constant, 1, lines + q * PAGE); break;
                case 2: dots(tile, n, dim, folded, constant, 2, lines + q * PAGE); break;
                case 3: dots(tile, n, dim, folded, constant, 3, lines + q * PAGE); break;
                default: dots(tile, n, dim, folded, constant, 4, lines + q * PAGE);
            }
        }
        unpack_page(value_codes + token * half, n, half, tile);
        for (int q = 0; q < queries; q++) {
            const size_t at = first + q;
            const float *restrict line = lines + q * PAGE;
            float high = largest(line, n, top[at]), total = 0.0f;
            for (int t = 0; t < n; t++) scores[(token + t) * queries + q] = line[t];
            const float decay = top[at] == -INFINITY ? 0.0f : exp_negative(top[at] - high);
            for (int t = 0; t < n; t++) probs[t] = exp_negative(line[t] - high);
            for (int t = 0; t < n; t++) total += probs[t];
            sum[at] = sum[at] * decay + total;
            top[at] = high;
            for (int g = 0; g < groups; g++) {
                float offset = 0.0f;
                for (int t = 0; t < n; t++) {
                    weight[t] = probs[t] * scales[t * groups + g];
                    offset += probs[t] * zeros[t * groups + g];
                }
                weigh(tile + g * width, n, dim, width, weight, decay, offset, out + at * dim + g * width);
            }
        }
    }
    for (int i = 0; i < all; i++) {
        lse[i] = sum[i] > 0.0f ? top[i] + logf(sum[i]) : -INFINITY;
        const float share = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
        for (int d = 0; d < dim; d++) out[(size_t)i * dim + d] *= share;
    }
    free(work);
    return 0;
}
