/* Attention of a few queries over the tokens of a layer, exact in float32.
 *
 * Compiled by fade_runtime/kernels/cpu/attention.py at first use. The storage format is defined by fade_runtime/storage/quant.py and
 * fade_runtime/storage/packed.py, the meaning of every argument by `attend` in fade_runtime/kernels/reference.py.
 *
 * Each row's tokens are cut into pieces. A piece has a softmax of its own (scores, exponentials, weighted values); the
 * pieces of a row are merged at the end, in order, so the result does not depend on how many threads shared them.
 * The head dim must be a multiple of 16.
 */
#include <pthread.h>
#include <stdlib.h>

#include "pieces.h"

/* -- merging ------------------------------------------------------------------------------------------------------ */

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
            piece *from = pieces + starts[row], *to = pieces + starts[row + rows];
            work_together(c, from, to, rotated, probs, workers, running, threads);
            for (int64_t i = row; i < row + rows; i++)
                merge(c, pieces + starts[i], pieces + starts[i + 1], c->out + i * queries * dim, merged);
        }
    }
    const int failed = !memory;
    free(memory), free(pieces), free(starts), free(workers), free(running);
    return failed;
}
