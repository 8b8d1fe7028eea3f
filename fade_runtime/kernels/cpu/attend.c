/* Attention of a few queries over the tokens of a layer, exact in float32: `attend`, the one function for others.
 *
 * The one translation unit: library.py compiles it at first use with the machine's own compiler. What Python fills in
 * is declared in abi.h; the .inc.h files hold static functions, each included once, from numbers up to splits. The
 * storage format is defined by fade_runtime/storage/quant.py and packed.py, the meaning of every argument by `attend`
 * in fade_runtime/kernels/reference.py.
 *
 * Each row's tokens are cut into splits, as in Flash-Decoding (Dao et al. 2023). A split has a softmax of its own
 * (scores, exponentials, weighted values); the splits of a row are merged at the end, in order, so that the result does
 * not depend on how many threads shared them. The head dim must be a multiple of 16.
 */
#include <pthread.h>
#include <stdlib.h>

#include "abi.h"

#include "vectors.inc.h"
#include "codes.inc.h"
#include "vnni.inc.h"
#include "splits.inc.h"

/* -- merging ------------------------------------------------------------------------------------------------------ */

/* Statistics of a split's tokens: each query's probabilities times its factor, on top of older ones. */
static void add_mass(const call *c, const split *p, const float *factor) {
    const int64_t stride = line_floats(p), whole = p->tokens / LANES * LANES;
    float *mass = p->part ? p->part->mass + p->first : c->mass + p->row * c->full + p->first, rest[LANES];
    for (int64_t t = 0; t < p->tokens; t += LANES) {
        const size_t size = sizeof(float) * (size_t)(p->tokens - t);
        float *to = t < whole ? mass + t : memcpy(rest, mass + t, size);
        vec sum = c->decay != 0.0f ? load(to) * c->decay : (vec){0};
        for (int64_t q = 0; q < c->queries; q++) sum += load(p->probs + q * stride + t) * factor[q];
        store(to, sum);
        if (t == whole) memcpy(mass + t, rest, size);
    }
}

/* Merge the splits of a row into its output, and its statistics; scratch: dim + splits * queries floats. */
static void merge(const call *c, int64_t row, const split *from, const split *to, float *scratch) {
    const int64_t dim = c->dim, queries = c->queries;
    float *rotated = scratch, *factor = scratch + dim, *out = c->out + row * queries * dim;
    for (int64_t q = 0; q < queries; q++, out += dim) {
        const float sink = c->sinks ? c->sinks[row * queries + q] : -INFINITY;
        float top = sink > -FLT_MAX ? sink : -FLT_MAX;
        for (const split *p = from; p < to; p++) top = p->top[q] > top ? p->top[q] : top;
        float total = exp_one(sink - top);
        for (const split *p = from; p < to; p++) total += p->sum[q] * exp_one(p->top[q] - top);
        memset(out, 0, sizeof(float) * (size_t)dim);
        memset(rotated, 0, sizeof(float) * (size_t)dim);
        for (const split *p = from; p < to; p++) {
            const float mine = total > 0.0f ? exp_one(p->top[q] - top) / total : 0.0f;
            float *sum = p->part ? rotated : out;
            for (int64_t d = 0; d < dim; d++) sum[d] += mine * p->acc[q * dim + d];
            factor[(p - from) * queries + q] = c->weights ? mine * c->weights[q] : 0.0f;
        }
        hadamard(rotated, dim);
        for (int64_t d = 0; d < dim; d++) out[d] += rotated[d];
    }
    for (const split *p = from; p < to && c->weights; p++) add_mass(c, p, factor + (p - from) * queries);
}

/* -- the call ----------------------------------------------------------------------------------------------------- */

/* Splits in the order of rows; returns their number. `starts` [rows + 1]: of each row; `cursor` [parts]: scratch. */
static int64_t make_splits(const call *c, split *splits, int64_t *starts, split *cursor) {
    int64_t count = 0;
    for (int64_t i = 0; i < c->parts; i++) cursor[i] = (split){.part = c->part + i};
    for (int64_t row = 0; row < c->rows; row++) {
        starts[row] = count;
        for (split *p = cursor; p < cursor + c->parts; p++) {
            const packed *part = p->part;
            while (p->page < part->pages && part->page_row[p->page] == row) {
                int64_t page = p->page, low = p->low;
                for (p->row = row, p->pages = 0, p->tokens = 0;
                     p->pages < SPLIT_PAGES && page < part->pages && part->page_row[page] == row; p->pages++, page++)
                    p->tokens += part->page_len[page], low += part->page_low[page];
                splits[count++] = *p;
                p->page = page, p->first += p->tokens, p->low = low;
            }
        }
        for (int64_t first = 0; first < c->full; first += SPLIT_TOKENS)
            splits[count++] = (split){.row = row, .first = first, .tokens = smaller(SPLIT_TOKENS, c->full - first)};
    }
    return starts[c->rows] = count;
}

typedef struct {
    const call *c;
    const float *rotated;
    const split *splits;
    int64_t count, *next;
    float *scratch;
} worker;

static void *run_worker(void *argument) {
    const worker *w = argument;
    for (;;) {
        const int64_t i = __atomic_fetch_add(w->next, 1, __ATOMIC_RELAXED);
        if (i >= w->count) return NULL;
        const split *p = w->splits + i;
        float *probs = p->probs ? p->probs : w->scratch + scratch_floats(w->c) - w->c->queries * MAX_LINE;
        if (p->part) packed_split(w->c, w->rotated, p, probs, w->scratch);
        else full_split(w->c, p, probs);
    }
}

/* Floats that keep the probabilities of some splits. */
static int64_t kept_floats(const call *c, const split *from, const split *to) {
    int64_t count = 0;
    for (; from < to && c->weights; from++) count += c->queries * line_floats(from);
    return count;
}

/* Share the splits out between threads; probs: for kept_floats. */
static void run_workers(const call *c, split *from, split *to, const float *rotated, float *probs, worker *workers,
                          pthread_t *running, int64_t threads) {
    int64_t next = 0, started = 1;
    for (split *p = from; p < to && c->weights; p++) p->probs = probs, probs += c->queries * line_floats(p);
    for (int64_t i = 0; i < threads; i++) {
        workers[i].c = c, workers[i].rotated = rotated, workers[i].splits = from;
        workers[i].count = to - from, workers[i].next = &next;
    }
    while (started < threads && !pthread_create(running + started, NULL, run_worker, workers + started)) started++;
    run_worker(workers);
    for (int64_t i = 1; i < started; i++) pthread_join(running[i], NULL);
}

/* Returns 0, or 1 without memory. Threads share all rows; one alone takes row by row, so that what it keeps of a row
 * stays in the processor's cache. */
int attend(const call *c) {
    const int64_t queries = c->queries, dim = c->dim, states = round_up(queries * (2 + dim));
    int64_t max_splits = c->rows * (1 + c->full / SPLIT_TOKENS), kept = 0;
    for (const packed *part = c->part; part < c->part + c->parts; part++)
        max_splits += part->pages / SPLIT_PAGES + smaller(part->pages, c->rows);
    const int64_t scratch = scratch_floats(c), threads = smaller(c->threads, max_splits);
    const int64_t rows = threads > 1 ? c->rows : 1;
    split *splits = malloc(sizeof(split) * (size_t)(max_splits + c->parts));
    int64_t *starts = malloc(sizeof(int64_t) * (size_t)(c->rows + 1));
    worker *workers = malloc(sizeof(worker) * (size_t)threads);
    pthread_t *running = malloc(sizeof(pthread_t) * (size_t)threads);
    float *memory = NULL;
    if (splits && starts && workers && running) {
        const int64_t count = make_splits(c, splits, starts, splits + max_splits);
        for (int64_t row = 0; row < c->rows; row += rows) {
            const int64_t floats = kept_floats(c, splits + starts[row], splits + starts[row + rows]);
            kept = floats > kept ? floats : kept;
        }
        const int64_t floats = c->rows * queries * dim + dim + round_up(count * queries) + count * states + kept;
        memory = aligned_alloc(sizeof(vec), sizeof(float) * (size_t)(floats + threads * scratch));
    }
    if (memory) {
        float *rotated = memory, *merged = rotated + c->rows * queries * dim;
        const int64_t count = starts[c->rows];
        float *state = merged + dim + round_up(count * queries);
        float *probs = state + count * states, *own = probs + kept;
        memcpy(rotated, c->query, sizeof(float) * (size_t)(c->rows * queries * dim));
        for (int64_t i = 0; i < c->rows * queries; i++) hadamard(rotated + i * dim, dim);
        memset(state, 0, sizeof(float) * (size_t)(count * states));
        for (split *p = splits; p < splits + count; p++, state += states)
            p->acc = state, p->top = state + queries * dim, p->sum = p->top + queries;
        for (int64_t i = 0; i < threads; i++) workers[i].scratch = own + i * scratch;
        for (int64_t row = 0; row < c->rows; row += rows) {
            split *from = splits + starts[row], *to = splits + starts[row + rows];
            run_workers(c, from, to, rotated, probs, workers, running, threads);
            for (int64_t i = row; i < row + rows; i++)
                merge(c, i, splits + starts[i], splits + starts[i + 1], merged);
        }
    }
    const int failed = !memory;
    free(memory), free(splits), free(starts), free(workers), free(running);
    return failed;
}
