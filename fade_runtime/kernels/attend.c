/* Attention of a few queries over the tiers of a layer: one pass, online softmax, exact in float32.
 *
 * Compiled by fade_runtime/kernels/cpu.py at first use. The storage format is defined by fade_runtime/quant.py, the
 * meaning of every argument by `attend` in fade_runtime/kernels/reference.py. One page (up to 64 tokens) is
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

/* Running softmax of one query: largest score, sum of exponentials; the weighted sum of values is kept apart. */
typedef struct {
    float top, sum;
} softmax;

/* Take `n` scores into a running softmax: probabilities relative to the new top; returns the decay of older sums. */
static inline float absorb(softmax *s, const float *restrict line, int n, float *restrict probs) {
    const float high = largest(line, n, s->top);
    const float decay = s->top == -INFINITY ? 0.0f : exp_negative(s->top - high);
    float total = 0.0f;
    for (int t = 0; t < n; t++) probs[t] = exp_negative(line[t] - high);
    for (int t = 0; t < n; t++) total += probs[t];
    s->sum = s->sum * decay + total;
    s->top = high;
    return decay;
}

/* mass[t] = sum over q of weights[q] * probability of scores[q][t]. */
static inline void masses(const float *restrict scores, int n, int queries, const softmax *restrict state,
                          const float *restrict weights, float *restrict mass) {
    memset(mass, 0, sizeof(float) * n);
    for (int q = 0; q < queries; q++) {
        const float top = state[q].top, share = weights[q] / state[q].sum;
        for (int t = 0; t < n; t++) mass[t] += share * exp_negative(scores[(size_t)q * n + t] - top);
    }
}

/* One page of scores for all queries: a constant count keeps the sums of `dots` in registers. */
static void page_scores(const float *tile, int n, int dim, const float *queries, const float *constants, int count,
                        float *lines) {
    for (int q = 0; q < count; q += 4) {
        const float *query = queries + q * dim, *constant = constants + q;
        float *line = lines + q * PAGE;
        switch (count - q) {
            case 1: dots(tile, n, dim, query, constant, 1, line); break;
            case 2: dots(tile, n, dim, query, constant, 2, line); break;
            case 3: dots(tile, n, dim, query, constant, 3, line); break;
            default: dots(tile, n, dim, query, constant, 4, line);
        }
    }
}

/* query, rotated [rows, queries, dim]; full_key, full_value [rows, full, dim];
 * page_len, page_row [pages]; key_codes, value_codes [tokens, dim / 2]; key_scale, key_zero [pages, dim];
 * value_scale, value_zero [tokens, groups]; weights [queries] or NULL;
 * out, out_rotated [rows, queries, dim]: the parts of full and packed tokens, to be added once rotated back;
 * mass_full [rows, full], mass_packed [tokens], written if there are weights. Returns 0, or 1 without memory. */
int attend(int rows, int queries, int dim, int groups, int pages, int full, const float *restrict query,
           const float *restrict rotated, const float *restrict full_key, const float *restrict full_value,
           const int32_t *restrict page_len, const int32_t *restrict page_row, const uint8_t *restrict key_codes,
           const _Float16 *restrict key_scale, const _Float16 *restrict key_zero, const uint8_t *restrict value_codes,
           const _Float16 *restrict value_scale, const _Float16 *restrict value_zero, const float *restrict weights,
           float *restrict out, float *restrict out_rotated, float *restrict mass_full, float *restrict mass_packed) {
    const int half = dim / 2, width = dim / groups;
    size_t tokens = 0;
    for (int p = 0; p < pages; p++) tokens += page_len[p];
    const size_t kept = weights ? ((size_t)rows * full + tokens) * queries : 0; /* scores, for the statistics */
    float *work = malloc(sizeof(float) * ((size_t)(PAGE + 2 + queries) * dim + (size_t)queries * (1 + PAGE) +
                                          (size_t)(2 + 2 * groups) * PAGE + kept));
    softmax *state = malloc(sizeof(softmax) * (size_t)rows * queries);
    if (!work || !state) {
        free(work), free(state);
        return 1;
    }
    float *tile = work, *scale = tile + PAGE * dim, *zero = scale + dim, *folded = zero + dim;
    float *constant = folded + queries * dim, *lines = constant + queries, *probs = lines + queries * PAGE;
    float *weight = probs + PAGE, *scales = weight + PAGE, *zeros = scales + PAGE * groups;
    float *scores_full = zeros + PAGE * groups, *scores_packed = scores_full + (size_t)rows * full * queries;
    for (int i = 0; i < rows * queries; i++) state[i] = (softmax){-INFINITY, 0.0f};
    memset(out, 0, sizeof(float) * (size_t)rows * queries * dim);
    memset(out_rotated, 0, sizeof(float) * (size_t)rows * queries * dim);

    size_t token = 0;
    for (int p = 0; p < pages; token += page_len[p++]) {
        const int n = page_len[p];
        const size_t first = (size_t)page_row[p] * queries;
        to_float(key_scale + (size_t)p * dim, dim, scale);
        to_float(key_zero + (size_t)p * dim, dim, zero);
        to_float(value_scale + token * groups, n * groups, scales);
        to_float(value_zero + token * groups, n * groups, zeros);
        for (int q = 0; q < queries; q++) {
            const float *mine = rotated + (first + q) * dim;
            float offset = 0.0f;
            for (int d = 0; d < dim; d++) folded[q * dim + d] = mine[d] * scale[d], offset += mine[d] * zero[d];
            constant[q] = offset;
        }
        unpack_page(key_codes + token * half, n, half, tile);
        page_scores(tile, n, dim, folded, constant, queries, lines);
        unpack_page(value_codes + token * half, n, half, tile);
        for (int q = 0; q < queries; q++) {
            if (weights) memcpy(scores_packed + token * queries + (size_t)q * n, lines + q * PAGE, sizeof(float) * n);
            const float decay = absorb(state + first + q, lines + q * PAGE, n, probs);
            for (int g = 0; g < groups; g++) {
                float offset = 0.0f;
                for (int t = 0; t < n; t++) {
                    weight[t] = probs[t] * scales[t * groups + g];
                    offset += probs[t] * zeros[t * groups + g];
                }
                weigh(tile + g * width, n, dim, width, weight, decay, offset,
                      out_rotated + (first + q) * dim + g * width);
            }
        }
    }

    memset(constant, 0, sizeof(float) * queries);
    for (int r = 0; r < rows; r++) {
        const size_t first = (size_t)r * queries;
        for (int t = 0; t < full; t += PAGE) {
            const int n = full - t < PAGE ? full - t : PAGE;
            const size_t at = (size_t)r * full + t;
            page_scores(full_key + at * dim, n, dim, query + first * dim, constant, queries, lines);
            for (int q = 0; q < queries; q++) {
                if (weights) memcpy(scores_full + at * queries + (size_t)q * n, lines + q * PAGE, sizeof(float) * n);
                const float decay = absorb(state + first + q, lines + q * PAGE, n, probs);
                float *packed_part = out_rotated + (first + q) * dim;
                for (int d = 0; d < dim; d++) packed_part[d] *= decay;
                weigh(full_value + at * dim, n, dim, dim, probs, decay, 0.0f, out + (first + q) * dim);
            }
        }
        for (int q = 0; q < queries; q++) {
            const float share = state[first + q].sum > 0.0f ? 1.0f / state[first + q].sum : 0.0f;
            for (int d = 0; d < dim; d++) out[(first + q) * dim + d] *= share, out_rotated[(first + q) * dim + d] *= share;
        }
    }

    if (weights) { /* statistics: the same scores under the final normaliser */
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < full; t += PAGE) {
                const int n = full - t < PAGE ? full - t : PAGE;
                const size_t at = (size_t)r * full + t;
                masses(scores_full + at * queries, n, queries, state + (size_t)r * queries, weights, mass_full + at);
            }
        token = 0;
        for (int p = 0; p < pages; token += page_len[p++])
            masses(scores_packed + token * queries, page_len[p], queries, state + (size_t)page_row[p] * queries, weights,
                   mass_packed + token);
    }
    free(work), free(state);
    return 0;
}
