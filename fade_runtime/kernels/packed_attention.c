/* Attention of a few queries over packed tokens: one pass, online softmax, exact in float32.
 *
 * Compiled by fade_runtime/kernels/cpu.py at first use. The storage format is defined by fade_runtime/quant.py, the
 * meaning of every argument by `packed_attention` in fade_runtime/kernels/reference.py. One page (up to 64 tokens) is
 * unpacked at a time into a buffer that stays in the first-level cache.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 64

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

static inline void unpack_page(const uint8_t *restrict codes, int tokens, int half, float *restrict out) {
    for (int t = 0; t < tokens; t++) {
        const uint8_t *restrict c = codes + (size_t)t * half;
        float *restrict low = out + (size_t)t * 2 * half, *restrict high = low + half;
        for (int i = 0; i < half; i++) {
            low[i] = (float)(c[i] & 15);
            high[i] = (float)(c[i] >> 4);
        }
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
    float *restrict work = malloc(sizeof(float) * ((size_t)PAGE * dim + dim + 3 * PAGE + 2 * (size_t)all));
    if (!work) return 1;
    float *restrict tile = work, *restrict folded = tile + (size_t)PAGE * dim;
    float *restrict line = folded + dim, *restrict probs = line + PAGE, *restrict weight = probs + PAGE;
    float *restrict top = weight + PAGE, *restrict sum = top + all;
    for (int i = 0; i < all; i++) top[i] = -INFINITY, sum[i] = 0.0f;
    memset(out, 0, sizeof(float) * (size_t)all * dim);

    size_t token = 0;
    for (int p = 0; p < pages; p++) {
        const int n = page_len[p];
        const size_t first = (size_t)page_row[p] * queries;
        unpack_page(key_codes + token * half, n, half, tile);
        for (int q = 0; q < queries; q++) {
            const float *restrict mine = query + (first + q) * dim;
            float constant = 0.0f;
            for (int d = 0; d < dim; d++) {
                folded[d] = mine[d] * (float)key_scale[(size_t)p * dim + d];
                constant += mine[d] * (float)key_zero[(size_t)p * dim + d];
            }
            for (int t = 0; t < n; t++) {
                const float *restrict key = tile + (size_t)t * dim;
                float dot = 0.0f;
                for (int d = 0; d < dim; d++) dot += folded[d] * key[d];
                scores[(token + t) * queries + q] = dot + constant;
            }
        }
        unpack_page(value_codes + token * half, n, half, tile);
        for (int q = 0; q < queries; q++) {
            float *restrict acc = out + (first + q) * dim;
            float high = top[first + q];
            for (int t = 0; t < n; t++) {
                line[t] = scores[(token + t) * queries + q];
                high = line[t] > high ? line[t] : high;
            }
            const float decay = exp_negative(top[first + q] - high);
            float total = 0.0f;
            for (int t = 0; t < n; t++) probs[t] = exp_negative(line[t] - high);
            for (int t = 0; t < n; t++) total += probs[t];
            sum[first + q] = (top[first + q] == -INFINITY ? 0.0f : sum[first + q] * decay) + total;
            top[first + q] = high;
            for (int g = 0; g < groups; g++) {
                float *restrict part = acc + g * width;
                float constant = 0.0f;
                for (int t = 0; t < n; t++) {
                    weight[t] = probs[t] * (float)value_scale[(token + t) * groups + g];
                    constant += probs[t] * (float)value_zero[(token + t) * groups + g];
                }
                for (int d = 0; d < width; d++) part[d] = part[d] * decay + constant;
                for (int t = 0; t < n; t++) {
                    const float *restrict value = tile + (size_t)t * dim + g * width;
                    const float w = weight[t];
                    for (int d = 0; d < width; d++) part[d] += w * value[d];
                }
            }
        }
        token += n;
    }
    for (int i = 0; i < all; i++) {
        lse[i] = sum[i] > 0.0f ? top[i] + logf(sum[i]) : -INFINITY;
        const float scale = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
        for (int d = 0; d < dim; d++) out[(size_t)i * dim + d] *= scale;
    }
    free(work);
    return 0;
}
