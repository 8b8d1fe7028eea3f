/* Attention of a few queries over the tokens of a layer, exact in float32.
 *
 * Compiled by fade_runtime/kernels/cpu.py at first use. The storage format is defined by fade_runtime/quant.py and
 * fade_runtime/packed.py, the meaning of every argument by `attend` in fade_runtime/kernels/reference.py.
 *
 * Each row's tokens are cut into pieces. A piece has a softmax of its own (scores, exponentials, weighted values); the
 * pieces of a row are merged at the end, in order, so the result does not depend on how many threads shared them.
 * Codes become floats in registers, or are multiplied in integers: a page's key scale is folded into the query, a
 * token's value scale into its probability, and so is what a code of the low tier stands for.
 * The head dim must be a multiple of 16.
 */
#include <pthread.h>
#include <stdlib.h>

#include "integers.h"

#define PIECE_PAGES 16 /* most pages of a piece */
#define PIECE (PAGE * PIECE_PAGES)
#define LINE_OF (PIECE + LANES) /* floats of a piece's line, and room for a vector that begins in it */

typedef struct {
    int64_t pages, key_bits, value_bits, low_key_bits, low_value_bits;
    const int32_t *page_len, *page_low, *page_row;
    const uint8_t *key_codes, *value_codes, *low_key_codes, *low_value_codes;
    const uint8_t *key_scale, *key_zero;
    const uint16_t *key_reach, *value_scale, *value_zero; /* float16 */
    const float *bias;              /* [tokens, queries], or NULL */
    float *mass;                    /* [tokens]; written if there are weights */
} packed;

typedef struct {
    int64_t rows, queries, dim, groups, parts, full, key_stride, value_stride, threads;
    const float *query;             /* [rows, queries, dim] */
    const float *key, *value;       /* [rows, full, dim], a row every key_stride, value_stride floats */
    const float *bias;              /* [rows, queries, full], or NULL */
    const float *weights;           /* [queries], or NULL: no statistics */
    const packed *part;             /* [parts] */
    float *out;                     /* [rows, queries, dim] */
    float *mass;                    /* [rows, full]; written if there are weights */
    float softcap;                  /* 0: none */
    float decay;                    /* of the statistics that lie where new ones are written; 0: none do */
} call;

typedef struct {
    const packed *part;             /* NULL: full-precision tokens */
    int64_t row, page, pages;
    int64_t first, low, tokens;     /* place among the part's (full-precision) tokens, among its low ones; count */
    float *probs;                   /* [queries, line_of] relative to top; NULL: not kept */
    float *top, *sum, *acc;         /* [queries], [queries], [queries, dim]: the piece's softmax */
} piece;

/* -- pieces ------------------------------------------------------------------------------------------------------- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Up to whole vectors: memory is cut at their multiples, since those that cross a line of the cache take twice as long. */
static int64_t rounded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* Floats from a piece's line to the next. */
static int64_t line_of(const piece *p) { return rounded(p->tokens) + LANES; }

/* Scores -> exponentials relative to their largest, which is returned with their sum; LANES more become 0. */
static void softmax(float *line, int64_t n, float *top, float *sum) {
    vec high = (vec){0} - FLT_MAX, all = {0}; /* finite where nothing is visible */
    for (int64_t t = n; t % (2 * LANES); t++) line[t] = -INFINITY;
    vec more = high;
    for (int64_t t = 0; t < n; t += 2 * LANES) high = larger(load(line + t), high), more = larger(load(line + t + LANES), more);
    high = larger(more, high);
    *top = high[0];
    for (int i = 1; i < LANES; i++) *top = high[i] > *top ? high[i] : *top;
    for (int64_t t = 0; t < n; t += LANES) {
        const vec p = exp_negative(load(line + t) - *top);
        store(line + t, p);
        all += p;
    }
    store(line + n, (vec){0});
    *sum = total(all);
}

/* Cap and bias, whose floats are `step` apart. */
static void finish(const call *c, float *line, int64_t n, const float *bias, int64_t step) {
    for (int64_t t = 0; t < n && c->softcap > 0.0f; t += LANES) {
        const vec x = load(line + t) / c->softcap;
        const ints sign = (ints)x & INT32_MIN;
        const vec e = exp_negative((vec)((ints)x | INT32_MIN) * 2.0f); /* tanh |x| = (1 - e) / (1 + e) */
        store(line + t, (vec)((ints)(c->softcap * (1.0f - e) / (1.0f + e)) | sign));
    }
    for (int64_t t = 0; t < n && bias; t++) line[t] += bias[t * step];
}

static void full_piece(const call *c, const piece *p, float *probs) {
    const int64_t dim = c->dim, stride = line_of(p);
    const float *key = c->key + p->row * c->key_stride + p->first * dim, zeros[BLOCK] = {0};
    const float *value = c->value + p->row * c->value_stride + p->first * dim;
    for (int64_t q = 0; q < c->queries; q += BLOCK) {
        const int count = (int)least(BLOCK, c->queries - q);
        float *lines = probs + q * stride;
        any_dots((const uint8_t *)key, FLOAT, p->tokens, dim, c->query + (p->row * c->queries + q) * dim, zeros, count,
                 lines, stride);
        for (int i = 0; i < count; i++) {
            const float *bias = c->bias ? c->bias + (p->row * c->queries + q + i) * c->full + p->first : NULL;
            finish(c, lines + i * stride, p->tokens, bias, 1);
            softmax(lines + i * stride, p->tokens, p->top + q + i, p->sum + q + i);
        }
        any_weigh((const uint8_t *)value, FLOAT, p->tokens, dim, 1, lines, stride, count, p->acc + q * dim);
    }
}

/* Scores of a page under up to BLOCK queries; scratch: 2 + 2 * BLOCK + PAGE vectors. */
static void page_scores(const packed *part, int64_t dim, const float *query, int count, int64_t page, int64_t high,
                        int64_t low, float *scratch, float *line, int64_t stride) {
    const int64_t few = part->page_low[page], many = part->page_len[page] - few;
    float *scale = scratch, *zero = scale + dim, *folded = zero + dim, *low_folded = folded + BLOCK * dim;
    float *tile = low_folded + BLOCK * dim, reach[3];
    const int bits = (int)part->key_bits, low_bits = (int)part->low_key_bits;
    const float step = step_of(bits, low_bits), rest = (step - 1) / 2;
    to_float(part->key_reach + page * 3, 3, reach);
    from_bytes(part->key_scale + page * dim, dim, reach[0] / 255.0f, 0.0f, scale);
    from_bytes(part->key_zero + page * dim, dim, reach[2] / 255.0f, reach[1], zero);
    narrow offsets[BLOCK] = {0}, scales[BLOCK] = {0};
    for (int q = 0; q < count; q++) {
        vec offset = {0}, all = {0};
        for (int64_t d = 0; d < dim; d += LANES) {
            const vec mine = load(query + q * dim + d), by = mine * load(scale + d);
            store(folded + q * dim + d, by);
            offset += mine * load(zero + d);
            if (few) store(low_folded + q * dim + d, by * step), all += by;
        }
        offsets[q] = halves(offset), scales[q] = halves(all);
    }
    const quad constant = sums(offsets[0], offsets[1], offsets[2], offsets[3]);
    const quad low_constant = constant + rest * sums(scales[0], scales[1], scales[2], scales[3]);
    const uint8_t *codes = part->key_codes + high * bytes_of(bits, dim);
    const uint8_t *low_codes = part->low_key_codes + low * bytes_of(low_bits, dim);
    const uint8_t *values = part->value_codes + high * bytes_of((int)part->value_bits, dim);
    const uint8_t *low_values = part->low_value_codes + low * bytes_of((int)part->low_value_bits, dim);
    if (many) code_dots(codes, bits, many, dim, folded, (const float *)&constant, count, line, stride, tile, values);
    if (few) code_dots(low_codes, low_bits, few, dim, low_folded, (const float *)&low_constant, count, line + many, stride, tile, low_values);
}

/* Float16 [n, groups] -> float32 [groups, LINE_OF], zero for a vector more; scratch: n * groups floats. */
static void by_group(const uint16_t *from, int64_t n, int64_t groups, float *scratch, float *to) {
    to_float(from, n * groups, groups == 1 ? to : scratch);
    for (int64_t t = 0; t < n && groups > 1; t++)
        for (int64_t g = 0; g < groups; g++) to[g * LINE_OF + t] = scratch[t * groups + g];
    for (int64_t g = 0; g < groups; g++) store(to + g * LINE_OF + n, (vec){0});
}

/* Weights of n tokens' codes under some queries, probabilities times a scale, and into the lanes of `sum` of each query
 * what their zeros weigh. A code stands for `step` levels, from `rest` on. Writes up to a vector more. */
static void weights(const float *probs, int64_t stride, int count, const float *scale, const float *zero, int64_t n,
                    float step, float rest, float *weight, float *sum, int64_t sum_stride) {
    for (int q = 0; q < count; q++) {
        vec all = load(sum + q * sum_stride);
        for (int64_t t = 0; t < n; t += LANES) {
            const vec by = load(scale + t);
            vec p = load(probs + q * stride + t);
            for (int i = 0; i < LANES && n - t < LANES; i++) p[i] = t + i < n ? p[i] : 0.0f; /* others follow */
            store(weight + q * LINE_OF + t, p * by * step);
            all += p * (load(zero + t) + by * rest);
        }
        store(sum + q * sum_stride, all);
    }
}

/* Add a piece's values to acc under up to BLOCK queries, whose probabilities are given. `scale`, `zero`
 * [groups, LINE_OF]; zeros [count, groups, LANES]: what the zeros weigh, in lanes; scratch: weights
 * [groups, BLOCK, LINE_OF], then what `code_weigh` asks for. */
static void piece_values(const call *c, const piece *p, const float *probs, int count, const float *scale,
                         const float *zero, float *scratch, float *zeros, float *acc) {
    const packed *part = p->part;
    const int64_t dim = c->dim, groups = c->groups, stride = line_of(p);
    float *tile = scratch + groups * BLOCK * LINE_OF;
    for (int low = 0; low < 2; low++) {
        const int bits = (int)(low ? part->low_value_bits : part->value_bits);
        const float step = low ? step_of((int)part->value_bits, bits) : 1.0f;
        const uint8_t *codes = low ? part->low_value_codes + p->low * bytes_of(bits, dim)
                                   : part->value_codes + (p->first - p->low) * bytes_of(bits, dim);
        int64_t tokens = 0, from = 0, to = 0; /* a run of tokens of the tier */
        for (int64_t page = p->page; page < p->page + p->pages; page++) {
            const int64_t few = part->page_low[page];
            if (low) from = to + part->page_len[page] - few;
            to += part->page_len[page];
            if (!low && !few && page + 1 < p->page + p->pages) continue;
            const int64_t n = low ? few : to - few - from;
            for (int64_t g = 0; g < groups; g++)
                weights(probs + from, stride, count, scale + g * LINE_OF + from, zero + g * LINE_OF + from, n, step,
                        (step - 1) / 2, scratch + g * BLOCK * LINE_OF + tokens, zeros + g * LANES, groups * LANES);
            tokens += n, from = to;
        }
        const int key_bits = (int)(low ? part->low_key_bits : part->key_bits);
        const uint8_t *keys = (low ? part->low_key_codes : part->key_codes) + bytes_of(key_bits, dim) * (tokens + (low ? p->low : p->first - p->low));
        if (tokens) code_weigh(codes, bits, tokens, dim, groups, scratch, LINE_OF, count, acc, tile, keys);
    }
}

static int64_t scratch_floats(const call *c) {
    const int64_t scores = (2 + 2 * BLOCK + PAGE) * c->dim, lines = c->groups * LINE_OF;
    const int64_t values = (2 + 2 * BLOCK) * lines + PAGE * c->dim + c->queries * c->groups * LANES;
    return (scores > values ? scores : values) + (c->weights ? 0 : c->queries * LINE_OF);
}

static void packed_piece(const call *c, const float *rotated, const piece *p, float *probs, float *scratch) {
    const packed *part = p->part;
    const int64_t dim = c->dim, groups = c->groups, stride = line_of(p), width = dim / groups;
    int64_t done = 0, low = p->low, high = p->first - p->low;
    const int64_t kb = bytes_of((int)part->key_bits, dim), vb = bytes_of((int)part->value_bits, dim);
    for (int64_t i = 0; i < p->tokens * vb; i += 4096) ask(part->value_codes + high * vb + i);
    for (int64_t i = 0; i < p->tokens * kb; i += 4096) ask(part->key_codes + (high + p->tokens) * kb + i);
    for (int64_t page = p->page; page < p->page + p->pages; page++) {
        const int64_t at = p->first + done, n = part->page_len[page];
        for (int64_t i = 0; i < n * groups; i += 32) ask(part->value_scale + at * groups + i), ask(part->value_zero + at * groups + i);
        for (int64_t i = 0; i < n && c->weights; i += LANES) ask(part->mass + at + i);
        for (int64_t q = 0; q < c->queries; q += BLOCK)
            page_scores(part, dim, rotated + (p->row * c->queries + q) * dim, (int)least(BLOCK, c->queries - q), page,
                        high, low, scratch, probs + q * stride + done, stride);
        done += part->page_len[page];
        low += part->page_low[page], high += part->page_len[page] - part->page_low[page];
    }
    for (int64_t q = 0; q < c->queries; q++) {
        finish(c, probs + q * stride, p->tokens, part->bias ? part->bias + p->first * c->queries + q : NULL, c->queries);
        softmax(probs + q * stride, p->tokens, p->top + q, p->sum + q);
    }
    float *scale = scratch, *zero = scale + groups * LINE_OF, *zeros = zero + groups * LINE_OF;
    float *rest = zeros + c->queries * groups * LANES;
    memset(zeros, 0, sizeof(float) * (size_t)(rest - zeros));
    by_group(part->value_scale + p->first * groups, p->tokens, groups, rest, scale);
    by_group(part->value_zero + p->first * groups, p->tokens, groups, rest, zero);
    for (int64_t q = 0; q < c->queries; q += BLOCK)
        piece_values(c, p, probs + q * stride, (int)least(BLOCK, c->queries - q), scale, zero, rest,
                     zeros + q * groups * LANES, p->acc + q * dim);
    for (int64_t i = 0; i < c->queries * groups; i++) {
        const float all = total(load(zeros + i * LANES));
        for (int64_t d = i * width; d < (i + 1) * width; d++) p->acc[d] += all;
    }
}

/* Statistics of a piece's tokens: each query's probabilities by its share, on top of older ones. */
static void receive(const call *c, const piece *p, const float *share) {
    const int64_t stride = line_of(p), whole = p->tokens / LANES * LANES;
    float *mass = p->part ? p->part->mass + p->first : c->mass + p->row * c->full + p->first, rest[LANES];
    for (int64_t t = 0; t < p->tokens; t += LANES) {
        const size_t size = sizeof(float) * (size_t)(p->tokens - t);
        float *to = t < whole ? mass + t : memcpy(rest, mass + t, size);
        vec sum = c->decay != 0.0f ? load(to) * c->decay : (vec){0};
        for (int64_t q = 0; q < c->queries; q++) sum += load(p->probs + q * stride + t) * share[q];
        store(to, sum);
        if (t == whole) memcpy(mass + t, rest, size);
    }
}

/* Merge the pieces of a row into its output, and its statistics; scratch: dim + pieces * queries floats. */
static void merge(const call *c, const piece *from, const piece *to, float *out, float *scratch) {
    const int64_t dim = c->dim, queries = c->queries;
    float *rotated = scratch, *share = scratch + dim;
    for (int64_t q = 0; q < queries; q++, out += dim) {
        float top = -FLT_MAX, total = 0.0f;
        for (const piece *p = from; p < to; p++) top = p->top[q] > top ? p->top[q] : top;
        for (const piece *p = from; p < to; p++) total += p->sum[q] * exp_one(p->top[q] - top);
        memset(out, 0, sizeof(float) * (size_t)dim);
        memset(rotated, 0, sizeof(float) * (size_t)dim);
        for (const piece *p = from; p < to; p++) {
            const float mine = total > 0.0f ? exp_one(p->top[q] - top) / total : 0.0f;
            float *sum = p->part ? rotated : out;
            for (int64_t d = 0; d < dim; d++) sum[d] += mine * p->acc[q * dim + d];
            share[(p - from) * queries + q] = c->weights ? mine * c->weights[q] : 0.0f;
        }
        hadamard(rotated, dim);
        for (int64_t d = 0; d < dim; d++) out[d] += rotated[d];
    }
    for (const piece *p = from; p < to && c->weights; p++) receive(c, p, share + (p - from) * queries);
}

/* -- the call ----------------------------------------------------------------------------------------------------- */

/* Pieces in the order of rows; returns their number. `starts` [rows + 1]: of each row; `open` [parts]: scratch. */
static int64_t cut(const call *c, piece *pieces, int64_t *starts, piece *open) {
    int64_t count = 0;
    for (int64_t i = 0; i < c->parts; i++) open[i] = (piece){.part = c->part + i};
    for (int64_t row = 0; row < c->rows; row++) {
        starts[row] = count;
        for (piece *p = open; p < open + c->parts; p++) {
            const packed *part = p->part;
            while (p->page < part->pages && part->page_row[p->page] == row) {
                int64_t page = p->page, low = p->low;
                for (p->row = row, p->pages = 0, p->tokens = 0;
                     p->pages < PIECE_PAGES && page < part->pages && part->page_row[page] == row; p->pages++, page++)
                    p->tokens += part->page_len[page], low += part->page_low[page];
                pieces[count++] = *p;
                p->page = page, p->first += p->tokens, p->low = low;
            }
        }
        for (int64_t first = 0; first < c->full; first += PIECE)
            pieces[count++] = (piece){.row = row, .first = first, .tokens = least(PIECE, c->full - first)};
    }
    return starts[c->rows] = count;
}

typedef struct {
    const call *c;
    const float *rotated;
    const piece *pieces;
    int64_t count, *next;
    float *scratch;
} worker;

static void *work(void *given) {
    const worker *w = given;
    for (;;) {
        const int64_t i = __atomic_fetch_add(w->next, 1, __ATOMIC_RELAXED);
        if (i >= w->count) return NULL;
        const piece *p = w->pieces + i;
        float *probs = p->probs ? p->probs : w->scratch + scratch_floats(w->c) - w->c->queries * LINE_OF;
        if (p->part) packed_piece(w->c, w->rotated, p, probs, w->scratch);
        else full_piece(w->c, p, probs);
    }
}

/* Floats that keep the probabilities of some pieces. */
static int64_t kept_floats(const call *c, const piece *from, const piece *to) {
    int64_t count = 0;
    for (; from < to && c->weights; from++) count += c->queries * line_of(from);
    return count;
}

/* Share the pieces out between threads; probs: for kept_floats. */
static void work_together(const call *c, piece *from, piece *to, const float *rotated, float *probs, worker *workers,
                          pthread_t *running, int64_t threads) {
    int64_t next = 0, started = 1;
    for (piece *p = from; p < to && c->weights; p++) p->probs = probs, probs += c->queries * line_of(p);
    for (int64_t i = 0; i < threads; i++) {
        workers[i].c = c, workers[i].rotated = rotated, workers[i].pieces = from;
        workers[i].count = to - from, workers[i].next = &next;
    }
    while (started < threads && !pthread_create(running + started, NULL, work, workers + started)) started++;
    work(workers);
    for (int64_t i = 1; i < started; i++) pthread_join(running[i], NULL);
}

/* Returns 0, or 1 without memory. Threads share all rows; one alone takes row by row, so that what it keeps of a row
 * stays in the processor's cache. */
int attend(const call *c) {
    const int64_t queries = c->queries, dim = c->dim, states = rounded(queries * (2 + dim));
    int64_t most = c->rows * (1 + c->full / PIECE), kept = 0; /* most: pieces */
    for (const packed *part = c->part; part < c->part + c->parts; part++)
        most += part->pages / PIECE_PAGES + least(part->pages, c->rows);
    const int64_t scratch = scratch_floats(c), threads = least(c->threads, most), rows = threads > 1 ? c->rows : 1;
    piece *pieces = malloc(sizeof(piece) * (size_t)(most + c->parts));
    int64_t *starts = malloc(sizeof(int64_t) * (size_t)(c->rows + 1));
    worker *workers = malloc(sizeof(worker) * (size_t)threads);
    pthread_t *running = malloc(sizeof(pthread_t) * (size_t)threads);
    float *memory = NULL;
    if (pieces && starts && workers && running) {
        const int64_t count = cut(c, pieces, starts, pieces + most);
        for (int64_t row = 0; row < c->rows; row += rows) {
            const int64_t floats = kept_floats(c, pieces + starts[row], pieces + starts[row + rows]);
            kept = floats > kept ? floats : kept;
        }
        const int64_t floats = c->rows * queries * dim + dim + rounded(count * queries) + count * states + kept;
        memory = aligned_alloc(sizeof(vec), sizeof(float) * (size_t)(floats + threads * scratch));
    }
    if (memory) {
        float *rotated = memory, *merged = rotated + c->rows * queries * dim;
        const int64_t count = starts[c->rows];
        float *state = merged + dim + rounded(count * queries);
        float *probs = state + count * states, *own = probs + kept;
        memcpy(rotated, c->query, sizeof(float) * (size_t)(c->rows * queries * dim));
        for (int64_t i = 0; i < c->rows * queries; i++) hadamard(rotated + i * dim, dim);
        memset(state, 0, sizeof(float) * (size_t)(count * states));
        for (piece *p = pieces; p < pieces + count; p++, state += states)
            p->acc = state, p->top = state + queries * dim, p->sum = p->top + queries;
        for (int64_t i = 0; i < threads; i++) workers[i].scratch = own + i * scratch;
        for (int64_t row = 0; row < c->rows; row += rows) {
            work_together(c, pieces + starts[row], pieces + starts[row + rows], rotated, probs, workers, running, threads);
            for (int64_t i = row; i < row + rows; i++)
                merge(c, pieces + starts[i], pieces + starts[i + 1], c->out + i * queries * dim, merged);
        }
    }
    const int failed = !memory;
    free(memory), free(pieces), free(starts), free(workers), free(running);
    return failed;
}
