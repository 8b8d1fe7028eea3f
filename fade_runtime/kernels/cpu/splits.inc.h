/* Splits: runs of a row's tokens that have a softmax of their own.
 *
 * Static functions of attend.c: scores, exponentials and weighted values of full-precision and of packed tokens. A
 * page's key scale is folded into the query, a token's value scale into its probability, and so is what a code of the
 * low tier stands for: codes are multiplied as they are. While the scores of a page are computed its values are
 * prefetched; while those are weighted, the keys of the next split.
 */
#define SPLIT_PAGES 16 /* most pages of a split */
#define SPLIT_TOKENS (PAGE * SPLIT_PAGES)
#define MAX_LINE (SPLIT_TOKENS + LANES) /* floats of a split's line, and room for a vector that begins in it */

typedef struct {
    const packed *part;             /* NULL: full-precision tokens */
    int64_t row, page, pages;
    int64_t first, low, tokens;     /* place among the part's (full-precision) tokens, among its low ones; count */
    float *probs;                   /* [queries, line_floats] relative to top; NULL: not kept */
    float *top, *sum, *acc;         /* [queries], [queries], [queries, dim]: the split's softmax */
} split;

/* -- splits ------------------------------------------------------------------------------------------------------- */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Up to whole vectors. Memory is cut at their multiples, so that no vector crosses a line of the cache. */
static int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* Floats from a split's line to the next. */
static int64_t line_floats(const split *p) { return round_up(p->tokens) + LANES; }

/* Scores -> exponentials relative to their largest, which is returned with their sum; LANES more become 0. */
static void softmax(float *line, int64_t n, float *top, float *sum) {
    vec high = (vec){0} - FLT_MAX, other = high, all = {0}; /* finite where nothing is visible */
    for (int64_t t = n; t % (2 * LANES); t++) line[t] = -INFINITY;
    for (int64_t t = 0; t < n; t += 2 * LANES) {
        high = larger(load(line + t), high);
        other = larger(load(line + t + LANES), other);
    }
    high = larger(other, high);
    *top = high[0];
    for (int i = 1; i < LANES; i++) *top = high[i] > *top ? high[i] : *top;
    for (int64_t t = 0; t < n; t += LANES) {
        const vec p = exp_negative(load(line + t) - *top);
        store(line + t, p);
        all += p;
    }
    store(line + n, (vec){0});
    *sum = lane_sum(all);
}

/* Cap and bias, whose floats are `step` apart. */
static void cap_and_bias(const call *c, float *line, int64_t n, const float *bias, int64_t step) {
    for (int64_t t = 0; t < n && c->softcap > 0.0f; t += LANES) {
        const vec x = load(line + t) / c->softcap;
        const ints sign = (ints)x & INT32_MIN;
        const vec e = exp_negative((vec)((ints)x | INT32_MIN) * 2.0f); /* tanh |x| = (1 - e) / (1 + e) */
        store(line + t, (vec)((ints)(c->softcap * (1.0f - e) / (1.0f + e)) | sign));
    }
    for (int64_t t = 0; t < n && bias; t++) line[t] += bias[t * step];
}

/* A token's slot, less its page's. */
static int64_t offset_of(const packed *part, int64_t token) {
    if (part->offset_bytes == 1) return ((const uint8_t *)part->offset)[token];
    return part->offset_bytes == 2 ? ((const int16_t *)part->offset)[token] : ((const int32_t *)part->offset)[token];
}

/* Scores of the tokens of a split before the first slot that is read become -inf. */
static void hide_before(const split *p, int64_t since, float *line) {
    const packed *part = p->part;
    int64_t token = p->first;
    for (int64_t page = p->page; page < p->page + p->pages; page++) {
        const int64_t end = token + part->page_len[page], hidden = since - part->page_slot[page];
        for (; token < end && hidden > 0; token++)
            if (offset_of(part, token) < hidden) line[token - p->first] = -INFINITY;
        token = end;
    }
}

static void full_split(const call *c, const split *p, float *probs) {
    const int64_t dim = c->dim, stride = line_floats(p);
    const float *key = c->key + p->row * c->key_stride + p->first * dim, zeros[BLOCK] = {0};
    const float *value = c->value + p->row * c->value_stride + p->first * dim;
    for (int64_t q = 0; q < c->queries; q += BLOCK) {
        const int count = (int)smaller(BLOCK, c->queries - q);
        float *lines = probs + q * stride;
        any_dots((const uint8_t *)key, FLOAT, p->tokens, dim, c->query + (p->row * c->queries + q) * dim, zeros, count,
                 lines, stride);
        for (int i = 0; i < count; i++) {
            const float *bias = c->bias ? c->bias + (p->row * c->queries + q + i) * c->full + p->first : NULL;
            cap_and_bias(c, lines + i * stride, p->tokens, bias, 1);
            softmax(lines + i * stride, p->tokens, p->top + q + i, p->sum + q + i);
        }
        any_weigh((const uint8_t *)value, FLOAT, p->tokens, dim, 1, lines, stride, count, p->acc + q * dim);
    }
}

/* Largest scale, least zero and spread of a page. */
static void read_reach(const uint16_t *from, float *reach) {
    from_float16(from, 3, reach);
    if (is_wide(from[0])) {
        reach[0] = -from_bfloat16(from[0]);
        reach[1] = from_bfloat16(from[1]), reach[2] = from_bfloat16(from[2]);
    }
}

/* Scores of a page under up to BLOCK queries; scratch: 2 + 2 * BLOCK + PAGE head dims. */
static void page_scores(const packed *part, int64_t dim, const float *query, int count, int64_t page, int64_t high,
                        int64_t low, float *scratch, float *line, int64_t stride) {
    const int64_t n_low = part->page_low[page], n_high = part->page_len[page] - n_low;
    float *scale = scratch, *zero = scale + dim, *folded = zero + dim, *low_folded = folded + BLOCK * dim;
    float *tile = low_folded + BLOCK * dim, reach[3];
    const int bits = (int)part->key_bits, low_bits = (int)part->low_key_bits;
    const float step = step_of(bits, low_bits), rest = (step - 1) / 2;
    read_reach(part->key_reach + page * 3, reach);
    affine_bytes(part->key_scale + page * dim, dim, reach[0] / 255.0f, 0.0f, scale);
    affine_bytes(part->key_zero + page * dim, dim, reach[2] / 255.0f, reach[1], zero);
    narrow offsets[BLOCK] = {0}, scales[BLOCK] = {0};
    for (int q = 0; q < count; q++) {
        vec zeros = {0}, all = {0};
        for (int64_t d = 0; d < dim; d += LANES) {
            const vec mine = load(query + q * dim + d), by = mine * load(scale + d);
            store(folded + q * dim + d, by);
            zeros += mine * load(zero + d);
            if (n_low) store(low_folded + q * dim + d, by * step), all += by;
        }
        offsets[q] = halves(zeros), scales[q] = halves(all);
    }
    const quad offset = lane_sums(offsets[0], offsets[1], offsets[2], offsets[3]);
    const quad low_offset = offset + rest * lane_sums(scales[0], scales[1], scales[2], scales[3]);
    float constant[BLOCK], low_constant[BLOCK];
    memcpy(constant, &offset, sizeof offset), memcpy(low_constant, &low_offset, sizeof low_offset);
    const uint8_t *codes = part->key_codes + high * bytes_of(bits, dim);
    const uint8_t *low_codes = part->low_key_codes + low * bytes_of(low_bits, dim);
    const uint8_t *values = part->value_codes + high * bytes_of((int)part->value_bits, dim);
    const uint8_t *low_values = part->low_value_codes + low * bytes_of((int)part->low_value_bits, dim);
    if (n_high) code_dots(codes, bits, n_high, dim, folded, constant, count, line, stride, tile, values);
    line += n_high;
    if (n_low)
        code_dots(low_codes, low_bits, n_low, dim, low_folded, low_constant, count, line, stride, tile, low_values);
}

/* Float16 [n, groups] -> float32 [groups, MAX_LINE], zero for a vector more; scratch: n * groups floats. */
static void by_group(const uint16_t *from, int64_t n, int64_t groups, float *restrict scratch, float *restrict to) {
    from_float16(from, n * groups, groups == 1 ? to : scratch);
    for (int64_t t = 0; t < n && groups == 2; t++) to[t] = scratch[2 * t], to[MAX_LINE + t] = scratch[2 * t + 1];
    for (int64_t g = 0; g < groups && groups > 2; g++)
        for (int64_t t = 0; t < n; t++) to[g * MAX_LINE + t] = scratch[t * groups + g];
    for (int64_t g = 0; g < groups; g++) store(to + g * MAX_LINE + n, (vec){0});
}

/* Scales and zeros of values in that form. */
static void value_params(const uint16_t *scales, const uint16_t *zeros, int64_t n, int64_t groups, float *scratch,
                         float *scale, float *zero) {
    int any = 0;
    by_group(scales, n, groups, scratch, scale);
    by_group(zeros, n, groups, scratch, zero);
    for (int64_t i = 0; i < n * groups; i++) any |= is_wide(scales[i]);
    for (int64_t i = 0; i < n * groups && any; i++)
        if (is_wide(scales[i])) {
            scale[i % groups * MAX_LINE + i / groups] = -from_bfloat16(scales[i]);
            zero[i % groups * MAX_LINE + i / groups] = from_bfloat16(zeros[i]);
        }
}

typedef struct {
    const float *probs;             /* [count, stride] */
    int64_t stride;
    int count;                      /* queries, up to BLOCK */
    const float *scale, *zero;      /* [groups, MAX_LINE] of the split's tokens */
    float *weight;                  /* [groups, BLOCK, MAX_LINE] of the codes of a tier */
    float *zeros;                   /* [count, groups, LANES]: what the zeros weigh, in lanes */
} weighting;

/* Weights, from `to` on, of the codes of n tokens from `from` on: probabilities times scales; and what zeros weigh. A
 * code stands for `step` levels. Writes up to a vector more. */
static void code_weights(const weighting *w, int64_t groups, int64_t from, int64_t n, float step, int64_t to) {
    const float rest = (step - 1) / 2;
    for (int64_t g = 0; g < groups; g++)
        for (int q = 0; q < w->count; q++) {
            const float *probs = w->probs + q * w->stride + from;
            const float *scale = w->scale + g * MAX_LINE + from, *zero = w->zero + g * MAX_LINE + from;
            float *weight = w->weight + (g * BLOCK + q) * MAX_LINE + to, *zeros = w->zeros + (q * groups + g) * LANES;
            vec sum = load(zeros);
            for (int64_t t = 0; t < n; t += LANES) {
                const vec by = load(scale + t);
                vec p = load(probs + t);
                for (int i = 0; i < LANES && n - t < LANES; i++) p[i] = t + i < n ? p[i] : 0.0f; /* of another tier */
                store(weight + t, p * by * step);
                sum += p * (load(zero + t) + by * rest);
            }
            store(zeros, sum);
        }
}

/* Weights of a tier's codes, in their order; returns their number. */
static int64_t tier_weights(const packed *part, const split *p, const weighting *w, int64_t groups, int low,
                            float step) {
    const int64_t end = p->page + p->pages;
    int64_t tokens = 0, from = 0, to = 0; /* from, to: a run of tokens of the tier */
    for (int64_t page = p->page; page < end; page++) {
        const int64_t n_low = part->page_low[page];
        from = low ? to + part->page_len[page] - n_low : from;
        to += part->page_len[page];
        if (!low && !n_low && page + 1 < end) continue; /* the next page goes on */
        const int64_t n = low ? n_low : to - n_low - from;
        code_weights(w, groups, from, n, step, tokens);
        tokens += n, from = to;
    }
    return tokens;
}

/* Add a split's values, but for their zeros, to acc; tile: what `code_weigh` needs. */
static void split_values(const call *c, const split *p, const weighting *w, float *acc, float *tile) {
    const packed *part = p->part;
    const int bits = (int)part->value_bits, low_bits = (int)part->low_value_bits;
    const int64_t dim = c->dim, high = p->first - p->low;
    int64_t n = tier_weights(part, p, w, c->groups, 0, 1.0f);
    const uint8_t *keys = part->key_codes + (high + n) * bytes_of((int)part->key_bits, dim);
    const uint8_t *codes = part->value_codes + high * bytes_of(bits, dim);
    if (n) code_weigh(codes, bits, n, dim, c->groups, w->weight, MAX_LINE, w->count, acc, tile, keys);
    n = p->tokens - n;
    keys = part->low_key_codes + (p->low + n) * bytes_of((int)part->low_key_bits, dim);
    codes = part->low_value_codes + p->low * bytes_of(low_bits, dim);
    if (n) tier_weights(part, p, w, c->groups, 1, step_of(bits, low_bits));
    if (n) code_weigh(codes, low_bits, n, dim, c->groups, w->weight, MAX_LINE, w->count, acc, tile, keys);
}

/* What a split needs at once: of its scores, then of its values; and its probabilities, where nobody keeps them. */
static int64_t scratch_floats(const call *c) {
    const int64_t scores = (2 + 2 * BLOCK + PAGE) * c->dim, lines = c->groups * MAX_LINE;
    const int64_t values = (2 + 2 * BLOCK) * lines + PAGE * c->dim + c->queries * c->groups * LANES;
    return (scores > values ? scores : values) + (c->weights ? 0 : c->queries * MAX_LINE);
}

/* Prefetch what stands beside the codes of a page. */
static void prefetch_params(const call *c, const packed *part, int64_t first, int64_t tokens) {
    const int64_t at = first * c->groups, params = tokens * c->groups, floats = c->weights ? tokens : 0;
    for (int64_t i = 0; i < params; i += 32) prefetch(part->value_scale + at + i), prefetch(part->value_zero + at + i);
    for (int64_t i = 0; i < floats; i += 16) prefetch(part->mass + first + i);
}

/* Prefetch a line of each page of memory, all at once, since its address takes as long to find as the line to come. */
static void prefetch_pages(const uint8_t *from, int64_t size) {
    for (int64_t i = 0; i < size; i += 4096) prefetch(from + i);
}

static void packed_split(const call *c, const float *rotated, const split *p, float *probs, float *scratch) {
    const packed *part = p->part;
    const int64_t dim = c->dim, groups = c->groups, queries = c->queries, stride = line_floats(p), width = dim / groups;
    const int64_t key_size = bytes_of((int)part->key_bits, dim), value_size = bytes_of((int)part->value_bits, dim);
    int64_t done = 0, low = p->low, high = p->first - p->low;
    prefetch_pages(part->value_codes + high * value_size, p->tokens * value_size);
    prefetch_pages(part->key_codes + (high + p->tokens) * key_size, p->tokens * key_size);
    for (int64_t page = p->page; page < p->page + p->pages; page++) {
        prefetch_params(c, part, p->first + done, part->page_len[page]);
        for (int64_t q = 0; q < queries; q += BLOCK)
            page_scores(part, dim, rotated + (p->row * queries + q) * dim, (int)smaller(BLOCK, queries - q), page, high,
                        low, scratch, probs + q * stride + done, stride);
        done += part->page_len[page];
        low += part->page_low[page], high += part->page_len[page] - part->page_low[page];
    }
    for (int64_t q = 0; q < queries; q++) {
        const float *bias = part->bias ? part->bias + p->first * queries + q : NULL;
        cap_and_bias(c, probs + q * stride, p->tokens, bias, queries);
        if (part->since) hide_before(p, part->since[p->row * queries + q], probs + q * stride);
        softmax(probs + q * stride, p->tokens, p->top + q, p->sum + q);
    }
    float *scale = scratch, *zero = scale + groups * MAX_LINE, *zeros = zero + groups * MAX_LINE;
    float *weight = zeros + queries * groups * LANES, *tile = weight + groups * BLOCK * MAX_LINE;
    memset(zeros, 0, sizeof(float) * (size_t)(weight - zeros));
    value_params(part->value_scale + p->first * groups, part->value_zero + p->first * groups, p->tokens, groups, tile,
                 scale, zero);
    for (int64_t q = 0; q < queries; q += BLOCK) {
        const weighting w = {.probs = probs + q * stride, .stride = stride, .count = (int)smaller(BLOCK, queries - q),
                             .scale = scale, .zero = zero, .weight = weight, .zeros = zeros + q * groups * LANES};
        split_values(c, p, &w, p->acc + q * dim, tile);
    }
    for (int64_t i = 0; i < queries * groups; i++) {
        const float all = lane_sum(load(zeros + i * LANES));
        for (int64_t d = i * width; d < (i + 1) * width; d++) p->acc[d] += all;
    }
}
