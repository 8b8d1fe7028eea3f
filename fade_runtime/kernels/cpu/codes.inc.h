/* Dot products with tokens, and weighted sums of them, read from their codes; codes become floats in registers.
 *
 * Static functions of attend.c. The format is defined by fade_runtime/storage/quant.py.
 */
/* Byte i of a token holds channel i of each of 8 / bits equal parts, the first part in the lowest bits. */
inlined int parts_of(int bits) { return bits == FLOAT ? 1 : 8 / bits; }

/* Levels of the high tier that share a level of the low one, which stands for their middle. */
inlined float step_of(int bits, int low_bits) { return (float)(1 << (bits - low_bits)); }

inlined int64_t bytes_of(int bits, int64_t dim) { return dim * bits / 8; }

/* 8 channels, from channel i, of a part of a token. */
inlined narrow channels(const uint8_t *token, int64_t i, int part, const int bits) {
    if (bits == FLOAT) return load_narrow((const float *)token + i);
    const narrow_ints codes = widen(token + i) >> (part * bits);
    return __builtin_convertvector((part + 1) * bits == 8 ? codes : codes & ((1 << bits) - 1), narrow);
}

/* line[q][t] = token t . query[q] + constant[q]; writes up to BLOCK - 1 more. */
inlined void dots(const uint8_t *from, const int bits, int64_t tokens, int64_t dim, const float *query,
                  const float *constant, const int count, float *line, int64_t stride) {
    const int parts = parts_of(bits);
    const int64_t width = dim / parts, size = bytes_of(bits, dim);
    for (int64_t t = 0; t < tokens; t += BLOCK) {
        narrow sum[BLOCK][BLOCK]; /* query, token */
#pragma GCC unroll 2
        for (int pair = 0; pair < BLOCK; pair += 2) {
            const int64_t at = t + pair < tokens ? t + pair : tokens - 1;
            const uint8_t *one = from + at * size, *two = at + 1 < tokens ? one + size : one;
            narrow a[BLOCK] = {{0}, {0}, {0}, {0}}, b[BLOCK] = {{0}, {0}, {0}, {0}};
            for (int64_t i = 0; i < width; i += NARROW)
                for (int part = 0; part < parts; part++) {
                    const narrow first = channels(one, i, part, bits), second = channels(two, i, part, bits);
                    for (int q = 0; q < count; q++) {
                        const narrow mine = load_narrow(query + q * dim + part * width + i);
                        a[q] += first * mine;
                        b[q] += second * mine;
                    }
                }
            for (int q = 0; q < count; q++) sum[q][pair] = a[q], sum[q][pair + 1] = b[q];
        }
        for (int q = 0; q < count; q++) {
            const quad four = lane_sums(sum[q][0], sum[q][1], sum[q][2], sum[q][3]) + constant[q];
            memcpy(line + q * stride + t, &four, sizeof four);
        }
    }
}

/* Up to BLOCK vectors of channels of `weigh`, from channel i of each part. */
inlined void weigh_some(const uint8_t *from, const int bits, const int steps, int64_t i, int64_t tokens, int64_t dim,
                        int64_t groups, const float *weight, int64_t stride, const int count, float *out) {
    const int parts = parts_of(bits);
    const int64_t width = dim / parts, size = bytes_of(bits, dim);
    narrow acc[BLOCK][BLOCK]; /* channels, query */
    const float *mine[BLOCK];
    for (int v = 0; v < steps * parts; v++) {
        const int64_t at = v % parts * width + i + v / parts * NARROW;
        mine[v] = weight + (groups == 1 ? 0 : at * groups / dim * BLOCK * stride);
        for (int q = 0; q < count; q++) acc[v][q] = load_narrow(out + q * dim + at);
    }
    for (int64_t t = 0; t < tokens; t++, from += size)
        for (int s = 0; s < steps; s++) {
            for (int part = 0; part < parts; part += 2) {
                const int v = s * parts + part, pair = parts == 1 ? 1 : 2;
                narrow x[2];
                for (int j = 0; j < pair; j++) x[j] = channels(from, i + s * NARROW, part + j, bits);
                __asm__ volatile("" ::: "memory"); /* weights are read again: kept in registers they push out sums */
                for (int q = 0; q < count; q++)
                    for (int j = 0; j < pair; j++) acc[v + j][q] += x[j] * mine[v + j][q * stride + t];
            }
        }
    for (int v = 0; v < steps * parts; v++)
        for (int q = 0; q < count; q++)
            store_narrow(out + q * dim + v % parts * width + i + v / parts * NARROW, acc[v][q]);
}

/* out[q][d] += sum over t of weight[group of d][q][t] * token t [d]; weight: [groups, BLOCK, stride]. */
inlined void weigh(const uint8_t *from, const int bits, int64_t tokens, int64_t dim, int64_t groups,
                   const float *weight, int64_t stride, const int count, float *out) {
    const int steps = BLOCK / parts_of(bits);
    const int64_t width = dim / parts_of(bits);
    int64_t i = 0;
    for (; i + steps * NARROW <= width; i += steps * NARROW)
        weigh_some(from, bits, steps, i, tokens, dim, groups, weight, stride, count, out);
    for (; i < width; i += NARROW) weigh_some(from, bits, 1, i, tokens, dim, groups, weight, stride, count, out);
}

/* Both with bits and count as constants, which keeps the sums in registers. */
#define EACH_COUNT(CASE, bits) CASE(bits, 1) CASE(bits, 2) CASE(bits, 3) CASE(bits, 4)
#define EACH(CASE) EACH_COUNT(CASE, 2) EACH_COUNT(CASE, 4) EACH_COUNT(CASE, 8) EACH_COUNT(CASE, FLOAT)

static void any_dots(const uint8_t *from, int bits, int64_t tokens, int64_t dim, const float *query,
                     const float *constant, int count, float *line, int64_t stride) {
#define CASE(BITS, COUNT) \
    case BITS * 8 + COUNT: dots(from, BITS, tokens, dim, query, constant, COUNT, line, stride); break;
    switch (bits * 8 + count) { EACH(CASE) }
#undef CASE
}

static void any_weigh(const uint8_t *from, int bits, int64_t tokens, int64_t dim, int64_t groups, const float *weight,
                      int64_t stride, int count, float *out) {
#define CASE(BITS, COUNT) \
    case BITS * 8 + COUNT: weigh(from, BITS, tokens, dim, groups, weight, stride, COUNT, out); break;
    if (count == BLOCK) { /* more sums than registers */
        const int half = BLOCK / 2;
        any_weigh(from, bits, tokens, dim, groups, weight, stride, half, out);
        any_weigh(from, bits, tokens, dim, groups, weight + half * stride, stride, half, out + half * dim);
        return;
    }
    switch (bits * 8 + count) { EACH(CASE) }
#undef CASE
}

/* Codes of up to a page of tokens, ready for the two above: as they are, or as floats where a part of a head dim is no
 * multiple of NARROW. */
static const uint8_t *loadable(const uint8_t *from, int *bits, int64_t tokens, int64_t dim, float *tile) {
    const int64_t width = dim / parts_of(*bits), size = bytes_of(*bits, dim);
    if (width % NARROW == 0) return from;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < dim; d++)
            tile[t * dim + d] = (float)(from[t * size + d % width] >> (d / width * *bits) & ((1 << *bits) - 1));
    *bits = FLOAT;
    return (const uint8_t *)tile;
}
