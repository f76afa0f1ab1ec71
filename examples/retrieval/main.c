/* main.c - retrieval: how often a model that was trained on data.dataset = retrieval finds the
   needle, by length of the row and by depth in it. Twin: README.md. Rows are those of
   source_retrieval.c that no training sees; the model reads them through its caches, as in
   decoding. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/rng.h"
#include "base/threads.h"
#include "data/source.h"
#include "train/restore.h"
#include "train/sample.h"

enum { CHUNK = 256, TENTHS = 10, SHORTEST = 16, LONGEST = 1 << 20 };
enum { LEAST_BLOCKS = 3 }; /* the forced ones */

typedef struct examiner {
    checkpoint checkpoint;
    ops ops;
    model model;
    source_window row;
    real *logits; /* of the questions and answers */
} examiner;

/* By tenths of the depth, the oldest first. Of those asked, `reached` read the needle itself,
   whether they make anything of it or not. */
typedef struct score {
    long long asked[TENTHS], right[TENTHS], reached[TENTHS], reached_right[TENTHS];
} score;

static bool selects(const config_model *m) {
    int64_t layer = 0;
    while (layer < m->n_layers && !attention_is_sparse(config_attention(m, layer))) layer++;
    return layer < m->n_layers;
}

/* n_sel 0: as many selected blocks as the model was trained with. */
static bool open_examiner(examiner *e, const char *path, int longest, int n_sel, fault *f) {
    if (!checkpoint_open(&e->checkpoint, path, f)) return false;
    if (n_sel) e->checkpoint.config.nsa.n_sel = n_sel;
    const config *c = &e->checkpoint.config;
    if (n_sel && !selects(&c->model))
        return fault_set(f, "--n-sel: has no effect: no layer of %s selects blocks", path);
    if (c->model.vocab_size < RETRIEVAL_VOCAB)
        return fault_set(f, "%s: model.vocab_size = %lld; data.dataset = retrieval needs %d", path,
                         (long long)c->model.vocab_size, RETRIEVAL_VOCAB);
    int vocab = (int)c->model.vocab_size, chunk = longest < CHUNK ? longest : CHUNK;
    if (!ops_cpu_open(&e->ops, threads_granted((int)c->runtime.threads), f) ||
        !restore_model(&e->model, &e->checkpoint, vocab, chunk, longest, &e->ops, f))
        return false;
    e->row.tokens = malloc(((size_t)longest + 1) * sizeof *e->row.tokens);
    e->row.starts = malloc((size_t)longest + 1);
    e->row.given = malloc((size_t)longest + 1);
    e->logits = malloc(2 * RETRIEVAL_NEEDLES * (size_t)vocab * sizeof *e->logits);
    return e->row.tokens && e->row.starts && e->row.given && e->logits
               ? true
               : fault_set(f, "out of memory");
}

static void close_examiner(examiner *e) {
    if (e->model.o) model_close(&e->model);
    if (e->ops.state) ops_cpu_close(&e->ops);
    checkpoint_close(&e->checkpoint);
    free(e->row.tokens);
    free(e->row.starts);
    free(e->row.given);
    free(e->logits);
}

static int likeliest(const real *logits, int vocab) {
    int best = 0;
    for (int i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* Whether the last layer's query in row `row` of the last pass has `place` among its keys: in the
   window, in a selected block, or because attention is dense. A compressed row does not count. */
static bool reaches(const model *m, int64_t place, int row) {
    const model_config *c = &m->config;
    int last = c->n_layers - 1, lists = c->n_kv_groups * c->n_sel;
    attention_kind kind = layer_kind(m, last);
    const int32_t *blocks = model_blocks(m, last) + (ptrdiff_t)row * lists;
    bool near = m->past - m->rows + row - place < c->w && kind != ATTENTION_CMP_SLC;
    bool found = kind == ATTENTION_FULL || near;
    for (int i = 0; attention_is_sparse(kind) && i < lists; i++)
        found |= blocks[i] == place / c->l_sel;
    return found;
}

static bool examine(examiner *e, int64_t sample, int length, score *s, fault *f) {
    int64_t places[RETRIEVAL_NEEDLES];
    int vocab = e->model.config.vocab;
    int count = source_retrieval_row((uint64_t)e->checkpoint.config.train.seed, RNG_RETRIEVAL_VAL,
                                     sample, length, &e->row, places);
    int first = length + 1 - 2 * count; /* of the questions */
    if (!model_restart(&e->model, f) ||
        !model_append(&e->model, e->row.tokens, first, 0, NULL, f) ||
        !model_append(&e->model, e->row.tokens + first, length - first, length - first, e->logits,
                      f))
        return false;
    for (int q = 0; q < count; q++) {
        int64_t tenth = places[q] * TENTHS / first;
        const real *logits = e->logits + (size_t)(2 * q) * (size_t)vocab;
        if (!sample_check(logits, vocab, e->checkpoint.path, (size_t)(first + 2 * q + 1), f))
            return false;
        int answer = likeliest(logits, vocab);
        bool right = answer == e->row.tokens[first + 2 * q + 1];
        bool reached = reaches(&e->model, places[q], 2 * q);
        s->asked[tenth]++;
        s->right[tenth] += right;
        s->reached[tenth] += reached;
        s->reached_right[tenth] += reached && right;
    }
    return true;
}

static bool examine_length(examiner *e, int samples, int length, fault *f) {
    score s = {0};
    for (int i = 0; i < samples; i++)
        if (!examine(e, i, length, &s, f)) return false;
    for (int t = 0; t < TENTHS; t++)
        printf("%d,%d,%lld,%lld,%lld,%lld\n", length, t, s.asked[t], s.right[t], s.reached[t],
               s.reached_right[t]);
    return files_end_output(f);
}

typedef struct options {
    int64_t n_sel; /* 0: as many as the model was trained with */
} options;

/* The lengths are words behind the checkpoint and the rows, as are `words` here. */
static bool read_numbers(const char *const *words, int64_t *rows, int64_t *longest, fault *f) {
    int64_t length;
    *longest = 0;
    if (!option_integer("ROWS", words[1], 1, LONGEST, rows, f)) return false;
    for (int i = 2; words[i]; i++) {
        if (!option_integer("LENGTH", words[i], SHORTEST, LONGEST, &length, f)) return false;
        if (length > *longest) *longest = length;
    }
    return true;
}

static int run(const char *const *words, const options *o, fault *f) {
    static examiner e;
    int64_t rows, longest;
    int code = 0;
    if (!read_numbers(words, &rows, &longest, f) ||
        !open_examiner(&e, words[0], (int)longest, (int)o->n_sel, f))
        code = 2;
    else
        printf("length,tenth,asked,right,reached,reached_right\n");
    for (int i = 2; !code && words[i]; i++)
        if (!examine_length(&e, (int)rows, atoi(words[i]), f)) code = 1;
    close_examiner(&e);
    return code;
}

int main(int argc, char **argv) {
    static const option own[] = {
        {.flag = "--n-sel",
         .kind = OPTION_INTEGER,
         .offset = offsetof(options, n_sel),
         .min = LEAST_BLOCKS,
         .max = LONGEST,
         .help = "blocks that are selected; default: as many as in training"},
    };
    static const option_command command = {
        .name = "retrieval",
        .summary = "how often a model finds the needle.\n\nPrints length, tenth of the depth, "
                   "questions asked, answered right, with the needle among the keys of the\n"
                   "question's token, and right of these; for ROWS rows of each LENGTH.",
        .words = "CHECKPOINT ROWS LENGTH...",
        .rows = own,
        .count = 1,
    };
    threads_wait_asleep(argv);
    options o = {0};
    fault f;
    const char **words = calloc((size_t)argc, sizeof *words);
    option_outcome outcome = OPTION_ERROR;
    if (words)
        outcome = option_read(&command, argc, argv, &o, words, &f);
    else
        fault_set(&f, "out of memory");
    int code = outcome == OPTION_HELP ? 0 : outcome == OPTION_ERROR ? 2 : run(words, &o, &f);
    if (code) fprintf(stderr, "retrieval: %s\n", f.text);
    free(words);
    return code;
}
