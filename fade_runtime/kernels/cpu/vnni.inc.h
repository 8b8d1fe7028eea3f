/* Dot products and weighted sums as in codes.inc.h, in integers where the processor multiplies bytes (AVX-512 VNNI).
 *
 * Static functions of attend.c. The floats that codes are multiplied by (a query, or the weights of a run of tokens)
 * are written as integers of three signed bytes times a common factor; codes are multiplied by each byte and summed
 * exactly, 64 products an instruction. `code_dots` and `code_weigh`, at the end, take this way or that of codes.inc.h.
 *
 * The byte planes. `to_bytes` writes up to BLOCK lines (queries) of floats x[line][i], each as factor times
 * b0 + 256 b1 + 256^2 b2, so that four neighbouring bytes are those of four neighbouring floats, which is what one
 * instruction multiplies:
 *
 *     byte    +0 ........ +15   +16 ....... +31   +32 ....... +47   +48 .. +63
 *     +0      b0 of x[0][0-15]  b1 of x[0][0-15]  b2 of x[0][0-15]  unused       each PLANE bytes
 *     +64     b0 of x[1][0-15]  b1 of x[1][0-15]  b2 of x[1][0-15]  unused       a LINE later
 *     +128    b0 of x[2][0-15]  b1 of x[2][0-15]  b2 of x[2][0-15]  unused
 *     +192    b0 of x[3][0-15]  b1 of x[3][0-15]  b2 of x[3][0-15]  unused
 *     +256    b0 of x[0][16-31] ...                                              `place(16)`: the next 16 floats
 *
 * The error. Let L be the largest |x| of those that share a factor, c the codes and C their sum. Then
 *
 *     |result - sum of c x| <= 2^-21 L C        (or L C, where L <= 3e-32 and every x is taken for 0).
 *
 * With M = LARGEST, an integer is n = round(x * fl(M / L)), which errs by at most 3/4: where the sum with `shift` falls
 * below 2^23 it is rounded twice, first to a multiple of 1/2 or less. With factor = fl(L / M), both quotients rounded,
 * |factor * n - x| <= 2^-23 |x| + 3/4 L / M <= 2.10e-7 L: times codes, 2.10e-7 L C. The sum over each byte is exact: it
 * stays within MOST_DIM * 255 * 128 < 2^24, which a float holds. `recombine` rounds three times, each by 2^-24 of a
 * number of at most L C, the first time of that plus 128 / M L C: 1.79e-7 L C. Together 3.89e-7 L C < 2^-21 L C.
 */
#if defined __AVX512VNNI__ && defined __AVX512VBMI__
#define INTEGERS
#endif

#ifdef INTEGERS
#define BYTES 3         /* of a float */
#define LARGEST 8.3e6f  /* of an integer: below 127 * (1 + 256 + 256^2) and below 2^24 - 0x808080 */
#define WIDTH 16        /* bytes of a token that are taken at once */
#define MOST_DIM 512    /* sums over channels stay below 2^24, which floats hold exactly */
#define MOST_GROUPS 8
#define RUN 128         /* tokens whose weights share a factor; their codes stay in the first level of the cache */
#define SHORT 32        /* bytes of a token of which two are read at once */

typedef __m512i zmm;

/* The first n of 16. */
inlined __mmask16 first_lanes(int64_t n) { return (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }

/* Where `to_bytes` puts the lowest byte of float i of the first line: see the figure. */
inlined int64_t place(int64_t i) { return (i & ~15) * 4 * BLOCK + (i & 15); }

#define PLANE 16        /* bytes from a float's byte to its next byte */
#define LINE 64         /* bytes from a line to the next */

/* Write `count` lines of n floats, `stride` apart, as byte planes, zeros from n to a multiple of 16; returns factor. */
inlined float to_bytes(const float *from, const int count, int64_t stride, int64_t n, int8_t *bytes) {
    const zmm planes = _mm512_set_epi8( /* byte 0 of the 16 floats, byte 1, byte 2, nothing */
        63, 59, 55, 51, 47, 43, 39, 35, 31, 27, 23, 19, 15, 11, 7, 3, 62, 58, 54, 50, 46, 42, 38, 34, 30, 26, 22, 18,
        14, 10, 6, 2, 61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5, 1, 60, 56, 52, 48, 44, 40, 36, 32, 28,
        24, 20, 16, 12, 8, 4, 0);
    const zmm half = _mm512_set1_epi32(0x808080); /* bytes become b + 128, none carries */
    const __m512 shift = _mm512_set1_ps(0x808080); /* exact, and so are the sums, which stay in (0, 2^24) */
    __m512 top[BLOCK] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < n; i += 16)
        for (int q = 0; q < count; q++) {
            const __m512 x = _mm512_maskz_loadu_ps(first_lanes(n - i), from + q * stride + i);
            top[q] = _mm512_max_ps(top[q], _mm512_abs_ps(x));
        }
    const __m512 all = _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
    const float largest = _mm512_reduce_max_ps(all), some = largest > 3e-32f ? largest : INFINITY;
    const __m512 scale = _mm512_set1_ps(LARGEST / some);
    for (int64_t i = 0; i < n; i += 16)
        for (int q = 0; q < count; q++) {
            const __m512 mine = _mm512_maskz_loadu_ps(first_lanes(n - i), from + q * stride + i);
            const zmm x = _mm512_xor_si512(_mm512_cvtps_epi32(_mm512_fmadd_ps(mine, scale, shift)), half);
            _mm512_storeu_si512(bytes + place(i) + q * LINE, _mm512_permutexvar_epi8(planes, x));
        }
    return largest / LARGEST;
}

/* 16 bytes of each of four tokens, `step` bytes apart. */
inlined zmm four_tokens(const uint8_t *from, int64_t step) {
    zmm four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(from + step)), 1);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(from + 2 * step)), 2);
    return _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(from + 3 * step)), 3);
}

/* The same, from byte i on, of SHORT tokens that follow each other. */
inlined zmm four_short_tokens(const uint8_t *from, int64_t i) {
    const zmm two = _mm512_loadu_si512(from), two_more = _mm512_loadu_si512(from + 2 * SHORT);
    const zmm first = _mm512_set_epi64(13, 12, 9, 8, 5, 4, 1, 0); /* 8 bytes each; of two_more from 8 on */
    return _mm512_permutex2var_epi64(two, _mm512_add_epi64(first, _mm512_set1_epi64(i / 8)), two_more);
}

/* The codes of a part in bytes that hold 8 / bits parts. */
inlined zmm part_codes(zmm bytes, int part, const int bits) {
    if (bits == 8) return bytes;
    return _mm512_and_si512(_mm512_srli_epi16(bytes, part * bits), _mm512_set1_epi8((1 << bits) - 1));
}

/* The same, but times 2^(part * bits). */
inlined zmm raised_codes(zmm bytes, int part, const int bits) {
    return bits == 8 ? bytes : _mm512_and_si512(bytes, _mm512_set1_epi8((char)(((1 << bits) - 1) << (part * bits))));
}

/* sum += products of each lane's four codes with four bytes, and so for two sums. Written out, since compilers load the
 * bytes first and then lack registers for sums. */
inlined void multiply(zmm *sum, zmm codes, const int8_t *bytes) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(codes), "m"(*(const int32_t *)bytes));
}

inlined void multiply_two(zmm *sum, zmm *sum2, zmm codes, zmm codes2, const int8_t *bytes) {
    zmm same;
    __asm__("vpbroadcastd %5, %2\n\tvpdpbusd %2, %3, %0\n\tvpdpbusd %2, %4, %1"
            : "+v"(*sum), "+v"(*sum2), "=&v"(same)
            : "v"(codes), "v"(codes2), "m"(*(const int32_t *)bytes));
}

/* The floats that the sums over each byte make. */
inlined __m512 recombine(const zmm *bytes, float factor) {
    __m512 sum = _mm512_cvtepi32_ps(bytes[BYTES - 1]);
    for (int b = BYTES - 2; b >= 0; b--)
        sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(bytes[b]));
    return _mm512_mul_ps(sum, _mm512_set1_ps(factor));
}

/* Four bytes a lane: bytes i + 4 * j to i + 4 * j + 3 of 16 tokens. */
inlined void columns(const uint8_t *from, int64_t size, int64_t i, zmm column[4]) {
    from += i;
    const zmm a = four_tokens(from, 4 * size), b = four_tokens(from + size, 4 * size);
    const zmm c = four_tokens(from + 2 * size, 4 * size), d = four_tokens(from + 3 * size, 4 * size);
    const zmm ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const zmm ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
    column[0] = _mm512_unpacklo_epi64(ab, cd), column[1] = _mm512_unpackhi_epi64(ab, cd);
    column[2] = _mm512_unpacklo_epi64(ab2, cd2), column[3] = _mm512_unpackhi_epi64(ab2, cd2);
}

/* The same of SHORT tokens, with fewer loads and shuffles. */
inlined void short_columns(const uint8_t *from, int64_t i, zmm column[4]) {
    const zmm first = _mm512_set_epi32(27, 19, 11, 3, 26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
    const zmm at = _mm512_add_epi32(first, _mm512_set1_epi32((int)i / 4));
    zmm x[4]; /* of four tokens each: bytes i to i + 3 of each, i + 4 to i + 7, ... */
    for (int k = 0; k < 4; k++, from += 4 * SHORT)
        x[k] = _mm512_permutex2var_epi32(_mm512_loadu_si512(from), at, _mm512_loadu_si512(from + 2 * SHORT));
    const zmm ab = _mm512_shuffle_i32x4(x[0], x[1], 0x44), cd = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
    const zmm ab2 = _mm512_shuffle_i32x4(x[0], x[1], 0xee), cd2 = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    column[0] = _mm512_shuffle_i32x4(ab, cd, 0x88), column[1] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
    column[2] = _mm512_shuffle_i32x4(ab2, cd2, 0x88), column[3] = _mm512_shuffle_i32x4(ab2, cd2, 0xdd);
}

/* `dots` of 16 * groups tokens, of which `tokens` are written. */
inlined void integer_dots_of(const uint8_t *from, const int bits, const int groups, int64_t tokens, const int64_t size,
                             const int8_t *query, float factor, const float *constant, const int count, float *line,
                             int64_t stride, const uint8_t *next) {
    zmm sum[BLOCK][2][BYTES] = {0}, column[2][4];
    for (int64_t i = 0; i < size; i += WIDTH) {
        for (int g = 0; g < groups; g++) {
            if (size == SHORT) short_columns(from + g * 16 * size, i, column[g]);
            else columns(from + g * 16 * size, size, i, column[g]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            for (int g = 0; g < groups; g++) prefetch(next + 16 * (g * size + i + 4 * j));
#pragma GCC unroll 4
            for (int part = 0; part < parts_of(bits); part++) {
                zmm codes[2];
                for (int g = 0; g < groups; g++) codes[g] = part_codes(column[g][j], part, bits);
                const int8_t *mine = query + place(part * size + i) + 4 * j;
                for (int q = 0; q < count; q++)
                    for (int b = 0; b < BYTES; b++) {
                        const int8_t *four = mine + q * LINE + b * PLANE;
                        if (groups == 1) multiply(&sum[q][0][b], codes[0], four);
                        else multiply_two(&sum[q][0][b], &sum[q][1][b], codes[0], codes[1], four);
                    }
            }
        }
    }
    for (int q = 0; q < count; q++)
        for (int g = 0; g < groups; g++) {
            const __m512 score = _mm512_add_ps(recombine(sum[q][g], factor), _mm512_set1_ps(constant[q]));
            _mm512_mask_storeu_ps(line + q * stride + 16 * g, first_lanes(tokens - 16 * g), score);
        }
}

inlined void integer_dots(const uint8_t *from, const int bits, int64_t tokens, int64_t dim, const float *query,
                          const float *constant, const int count, float *line, int64_t stride, const uint8_t *next) {
    const int64_t size = bytes_of(bits, dim);
    _Alignas(64) int8_t bytes[BLOCK * 4 * MOST_DIM];
    uint8_t padded[16 * MOST_DIM];
    const float factor = to_bytes(query, count, dim, dim, bytes);
    int64_t t = 0;
    for (; t + 32 <= tokens && bits < 8 && size == SHORT; t += 32)
        integer_dots_of(from + t * size, bits, 2, 32, SHORT, bytes, factor, constant, count, line + t, stride,
                        next + t * size);
    for (; t + 32 <= tokens; t += 32)
        integer_dots_of(from + t * size, bits, 2, 32, size, bytes, factor, constant, count, line + t, stride,
                        next + t * size);
    for (; t < tokens; t += 16) {
        const uint8_t *mine = from + t * size;
        if (t + 16 > tokens) mine = memcpy(padded, mine, (size_t)((tokens - t) * size));
        integer_dots_of(mine, bits, 1, tokens - t, size, bytes, factor, constant, count, line + t, stride,
                        next + t * size);
    }
}

/* One or two parts of `weigh`, from channel i of each, 16 channels, tokens first to last (a multiple of 4); weight: the
 * bytes of each group's weights of a run, factor: of each group. */
inlined void integer_weigh_of(const uint8_t *from, const int bits, const int part, int64_t i, int64_t first,
                              int64_t last, const int64_t size, int64_t dim, const int64_t groups,
                              const int8_t *weight, const float *factor, const int count, float *out,
                              const uint8_t *next) {
    const int parts = bits == 8 ? 1 : 2;
    const zmm by_token = _mm512_set_epi8(
        63, 47, 31, 15, 62, 46, 30, 14, 61, 45, 29, 13, 60, 44, 28, 12, 59, 43, 27, 11, 58, 42, 26, 10, 57, 41, 25, 9,
        56, 40, 24, 8, 55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21, 5, 52, 36, 20, 4, 51, 35, 19, 3, 50, 34, 18, 2, 49, 33,
        17, 1, 48, 32, 16, 0);
    zmm sum[2][BLOCK][BYTES] = {0};
    int64_t group[2] = {0};
    for (int p = 0; p < parts && groups > 1; p++) group[p] = ((part + p) * size + i) * groups / dim;
    const int8_t *mine[2] = {weight + place(group[0] * RUN), weight + place(group[1] * RUN)};
    for (int64_t t = first; t < last; t += 4, from += 4 * size) {
        prefetch(next + t * WIDTH);
        const zmm mixed = size == SHORT ? four_short_tokens(from, i) : four_tokens(from + i, size);
        const zmm four = _mm512_permutexvar_epi8(by_token, mixed);
        zmm codes[2];
        for (int p = 0; p < parts; p++) codes[p] = raised_codes(four, part + p, bits);
        for (int q = 0; q < count; q++)
            for (int b = 0; b < BYTES; b++) {
                const int64_t at = place(t) + q * LINE + b * PLANE;
                if (parts == 2 && groups == 1)
                    multiply_two(&sum[0][q][b], &sum[1][q][b], codes[0], codes[1], mine[0] + at);
                else
                    for (int p = 0; p < parts; p++) multiply(&sum[p][q][b], codes[p], mine[p] + at);
            }
    }
    for (int p = 0; p < parts; p++)
        for (int q = 0; q < count; q++) {
            float *to = out + q * dim + (part + p) * size + i;
            const float unit = factor[group[p]] / (float)(1 << (bits == 8 ? 0 : (part + p) * bits));
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), recombine(sum[p][q], unit)));
        }
}

inlined void integer_weigh(const uint8_t *from, const int bits, int64_t tokens, int64_t dim, const int64_t groups,
                           const float *weight, int64_t stride, const int count, float *out, const uint8_t *next) {
    const int64_t size = bytes_of(bits, dim);
    _Alignas(64) int8_t bytes[MOST_GROUPS * BLOCK * 4 * RUN];
    uint8_t padded[4 * MOST_DIM];
    float factor[MOST_GROUPS];
    for (int64_t first = 0; first < tokens; first += RUN, from += RUN * size, next += RUN * size) {
        const int64_t n = tokens - first < RUN ? tokens - first : RUN, fours = n & ~3;
        for (int64_t g = 0; g < groups; g++)
            factor[g] = to_bytes(weight + g * BLOCK * stride + first, count, stride, n, bytes + place(g * RUN));
        if (fours < n) memcpy(padded, from + fours * size, (size_t)((n - fours) * size));
        for (int64_t i = 0; i < size; i += WIDTH)
            for (int part = 0; part < parts_of(bits); part += 2) {
                const uint8_t *then = next + i * n;
                if (bits < 8 && groups == 1 && size == SHORT)
                    integer_weigh_of(from, bits, part, i, 0, fours, SHORT, dim, 1, bytes, factor, count, out, then);
                else
                    integer_weigh_of(from, bits, part, i, 0, fours, size, dim, groups, bytes, factor, count, out, then);
                if (fours < n)
                    integer_weigh_of(padded, bits, part, i, fours, fours + 4, size, dim, groups, bytes, factor, count,
                                     out, then);
            }
    }
}
#endif

/* Whether codes of a token come in whole vectors that lie in one group of values. */
inlined int in_integers(int bits, int64_t dim, int64_t groups) {
#ifdef INTEGERS
    return bits != FLOAT && bytes_of(bits, dim) % WIDTH == 0 && dim / groups % 16 == 0 &&
           dim <= MOST_DIM && groups <= MOST_GROUPS;
#else
    return (void)bits, (void)dim, (void)groups, 0;
#endif
}

#define EACH_BITS(CASE) EACH_COUNT(CASE, 2) EACH_COUNT(CASE, 4) EACH_COUNT(CASE, 8)

/* `any_dots` of codes as they are stored; tile: tokens * dim floats. As many bytes are prefetched from `next`. */
static void code_dots(const uint8_t *from, int bits, int64_t tokens, int64_t dim, const float *query,
                      const float *constant, int count, float *line, int64_t stride, float *tile,
                      const uint8_t *next) {
#ifdef INTEGERS
#define CASE(BITS, COUNT) \
    case BITS * 8 + COUNT: integer_dots(from, BITS, tokens, dim, query, constant, COUNT, line, stride, next); return;
    if (in_integers(bits, dim, 1)) switch (bits * 8 + count) { EACH_BITS(CASE) }
#undef CASE
#endif
    for (int64_t i = 0; i < tokens * bytes_of(bits, dim); i += 64) prefetch(next + i);
    from = loadable(from, &bits, tokens, dim, tile);
    any_dots(from, bits, tokens, dim, query, constant, count, line, stride);
}

/* `any_weigh` of codes as they are stored; tile: PAGE * dim floats. As many bytes are prefetched from `next`. */
static void code_weigh(const uint8_t *from, int bits, int64_t tokens, int64_t dim, int64_t groups, const float *weight,
                       int64_t stride, int count, float *out, float *tile, const uint8_t *next) {
#ifdef INTEGERS
#define CASE(BITS, COUNT)                                                                             \
    case BITS * 8 + COUNT:                                                                            \
        if (groups == 1) integer_weigh(from, BITS, tokens, dim, 1, weight, stride, COUNT, out, next); \
        else integer_weigh(from, BITS, tokens, dim, groups, weight, stride, COUNT, out, next);        \
        return;
    if (in_integers(bits, dim, groups)) switch (bits * 8 + count) { EACH_BITS(CASE) }
#undef CASE
#endif
    const int64_t size = bytes_of(bits, dim);
    for (int64_t t = 0, n; t < tokens; t += n) {
        int loadable_bits = bits;
        n = tokens - t < PAGE ? tokens - t : PAGE;
        for (int64_t i = t * size; i < (t + n) * size; i += 64) prefetch(next + i);
        const uint8_t *codes = loadable(from + t * size, &loadable_bits, n, dim, tile);
        any_weigh(codes, loadable_bits, n, dim, groups, weight + t, stride, count, out);
    }
}
