/* main.c - generate: text from a checkpoint of either trainer, token by token from a cache. Twin:
   README.md. The cache is the model's (model_append), drawing is sample.c's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/threads.h"
#include "data/format.h"
#include "options.h"
#include "stop.h"
#include "train/restore.h"
#include "train/sample.h"

enum { PROMPT_LIMIT = 1 << 26, BENCH_TOKENS = 32, DEFAULT_LENGTH = 200, UNASKED = -1 };

typedef struct generator {
    options options;
    checkpoint checkpoint; /* its config is the one in force */
    tokenizer *tokenizer;
    token_list text; /* the prompt, then what follows */
    model model;
    ops ops;
    real *logits;
    int32_t *order;
} generator;

/* ---- Opening ------------------------------------------------------------------------------- */

static bool read_prompt(generator *g, int vocab, fault *f) {
    const char *text = g->checkpoint.config.sample.prompt;
    size_t bytes = strlen(text);
    char *file = NULL;
    bool ok = true;
    if (g->options.prompt_file) {
        text = file = files_read_input(g->options.prompt_file, PROMPT_LIMIT, &bytes, f);
        ok = text && format_prompt(g->options.prompt_file, &text, &bytes, f);
    }
    ok = ok && sample_prompt(g->tokenizer, text, bytes, vocab, &g->text, f);
    free(file);
    return ok;
}

/* How far RoPE is stretched. */
static double stretch(const config *c) {
    return c->model.rope_scaling == NSA_ROPE_SCALING_NONE ? 1 : c->model.rope_factor;
}

/* Prompt and text must fit; a length that nobody asked for becomes one that does. */
static bool fit_context(generator *g, int64_t context, fault *f) {
    long long prompt = (long long)g->text.count, room = context - prompt;
    int64_t *length = &g->checkpoint.config.sample.length;
    char shorter[64] = "";
    if (*length == UNASKED) *length = room < 1 ? 1 : room < DEFAULT_LENGTH ? room : DEFAULT_LENGTH;
    if (g->options.bench && context < 2 * BENCH_TOKENS)
        return fault_set(f, "--bench: a context of %lld; at least %d (--context)",
                         (long long)context, 2 * BENCH_TOKENS);
    if (g->options.bench || *length <= room) return true;
    if (room > 0) snprintf(shorter, sizeof shorter, " --length %lld,", room);
    return fault_set(f,
                     "a prompt of %lld tokens and %lld more are %lld: the context is %lld; a "
                     "shorter prompt,%s or --context %lld (beyond what the model was trained for, "
                     "--rope-scaling may help)",
                     prompt, (long long)*length, prompt + (long long)*length, (long long)context,
                     shorter, prompt + (long long)*length);
}

static bool open_generator(generator *g, fault *f) {
    config *c = &g->checkpoint.config;
    if (!checkpoint_open(&g->checkpoint, g->options.checkpoint, f)) return false;
    c->sample.length = UNASKED;
    double trained = (double)c->train.seq_len / stretch(c);
    config_take(c, &g->options.settings);
    listener notes = listener_stderr();
    if (!config_check_model(c, f) || !config_check_effects(c, &notes, f)) return false;
    g->tokenizer = tokenizer_open(c->data.tokenizer, c->data.tokenizer_path, f);
    if (!g->tokenizer ||
        !restore_same_vocabulary(&g->checkpoint, g->tokenizer, c->data.tokenizer_path, f))
        return false;
    if (g->options.ignore_end && tokenizer_end(g->tokenizer) < 0)
        listener_say(&notes, "--ignore-eos: no effect: bytes have no token that ends a text");
    int vocab = c->model.vocab_size ? (int)c->model.vocab_size : tokenizer_vocab_size(g->tokenizer);
    int64_t context = g->options.context ? g->options.context : (int64_t)(trained * stretch(c));
    if (!read_prompt(g, vocab, f) || !fit_context(g, context, f)) return false;
    int64_t room = g->options.bench ? context : (int64_t)g->text.count + c->sample.length;
    int chunk = g->options.chunk < room ? (int)g->options.chunk : (int)room;
    if (!ops_cpu_open(&g->ops, threads_granted((int)c->runtime.threads), f) ||
        !restore_model(&g->model, &g->checkpoint, vocab, chunk, (int)room, &g->ops, f))
        return false;
    g->logits = malloc((size_t)vocab * sizeof *g->logits);
    g->order = malloc((size_t)vocab * sizeof *g->order);
    return g->logits && g->order ? true : fault_set(f, "out of memory");
}

static void close_generator(generator *g) {
    if (g->model.o) model_close(&g->model);
    if (g->ops.state) ops_cpu_close(&g->ops);
    checkpoint_close(&g->checkpoint);
    tokenizer_close(g->tokenizer);
    token_list_free(&g->text);
    free(g->logits);
    free(g->order);
}

/* ---- Text ---------------------------------------------------------------------------------- */

/* Keys that a token has read in a layer and kv head, the mean over `tokens` and layers: counted by
   the library where attention is sparse. `dense` is what all of a full layer's tokens read, the
   first of them `first`, and a window's follow from their places. */
static double keys_read(const model *m, const nsa_reads *before, int first, double tokens,
                        double dense) {
    const model_config *c = &m->config;
    nsa_reads r = m->reads;
    double sparse = (double)(r.cmp + r.slc + r.win - before->cmp - before->slc - before->win);
    double sum = sparse / c->n_kv_groups;
    for (int i = 0; i < c->n_layers; i++) {
        if (layer_kind(m, i) == ATTENTION_FULL) sum += dense * tokens;
        for (int t = 0; layer_kind(m, i) == ATTENTION_WINDOW && t < (int)tokens; t++)
            sum += first + t + 1 < c->w ? first + t + 1 : c->w;
    }
    return sum / (tokens * c->n_layers);
}

/* What came of it. */
typedef struct result {
    int64_t drawn; /* tokens */
    double dense;  /* keys that dense attention would have read for them */
    bool ended;    /* by the model, or by --stop */
} result;

static bool put(generator *g, stop_printer *p, int32_t token, fault *f) {
    size_t bytes;
    const char *text = tokenizer_bytes(g->tokenizer, token, &bytes);
    return stop_put(p, text, bytes, f) && files_end_output(f);
}

/* The prompt as it was given. */
static void put_prompt(generator *g, stop_printer *p, size_t prompt) {
    for (size_t i = sample_unseen(g->tokenizer, g->text.ids, prompt); i < prompt; i++)
        sample_put(&p->out, g->tokenizer, g->text.ids[i]);
}

/* Token after token, until the length, the end of the text or --stop. */
static bool extend(generator *g, stop_printer *p, result *r, fault *f) {
    const config_sample *c = &g->checkpoint.config.sample;
    uint64_t seed = (uint64_t)g->checkpoint.config.train.seed;
    int vocab = g->model.config.vocab;
    int32_t end = g->options.ignore_end ? -1 : tokenizer_end(g->tokenizer);
    while (r->drawn < c->length) {
        if (!sample_check(g->logits, vocab, g->checkpoint.path, g->text.count, f)) return false;
        sample_discourage(g->logits, vocab, c, &g->text, g->order);
        int32_t next = sample_token(g->logits, vocab, c, seed, (uint64_t)r->drawn++, g->order);
        r->ended = next == end;
        if (r->ended) return true;
        if (!put(g, p, next, f)) return false;
        r->ended = p->found;
        if (r->ended) return true;
        if (!token_list_push(&g->text, next)) return fault_set(f, "out of memory");
        if (r->drawn == c->length) return true;
        if (!model_append(&g->model, &next, 1, 1, g->logits, f)) return false;
        r->dense += g->model.past;
    }
    return true;
}

static bool generate(generator *g, fault *f) {
    stop_printer out = {.out = {.out = stdout}, .stops = &g->options.stops};
    result r = {.drawn = 0};
    int prompt = (int)g->text.count;
    double begin = clock_seconds();
    bool ok = model_append(&g->model, g->text.ids, prompt, 1, g->logits, f);
    double prefilled = clock_seconds();
    nsa_reads before = g->model.reads;
    if (ok) put_prompt(g, &out, (size_t)prompt);
    ok = ok && extend(g, &out, &r, f);
    stop_flush(&out);
    stop_close(&out);
    double steps = (double)r.drawn - 1, end = clock_seconds();
    if (!ok) return false;
    printf("\n");
    if (!files_end_output(f)) return false; /* figures come behind the text, wherever the two go */
    fprintf(stderr, "prompt: %d tokens, %.0f tokens/s\n", prompt, prompt / (prefilled - begin));
    const char *why = !r.ended ? "" : out.found ? " (--stop)" : " (the end of the text)";
    if (steps < 1) {
        if (r.ended) fprintf(stderr, "text: %lld token%s\n", (long long)r.drawn, why);
        return true;
    }
    double keys = keys_read(&g->model, &before, prompt, steps, r.dense / steps);
    fprintf(stderr,
            "text: %lld tokens%s, %.0f tokens/s; a token read %.1f keys, dense attention reads "
            "%.1f (%.0f %%)\n",
            (long long)r.drawn, why, steps / (end - prefilled), keys, r.dense / steps,
            100 * keys * steps / r.dense);
    return true;
}

/* ---- --bench ------------------------------------------------------------------------------- */

/* Up to each length the prompt, again and again; then BENCH_TOKENS one by one. */
static bool bench_length(generator *g, int length, fault *f) {
    model *m = &g->model;
    int count = length - BENCH_TOKENS - m->past;
    int32_t *tokens = malloc((size_t)length * sizeof *tokens);
    if (!tokens) return fault_set(f, "out of memory");
    for (int i = 0; i < length; i++) tokens[i] = g->text.ids[(size_t)(m->past + i) % g->text.count];
    double begin = clock_seconds();
    bool ok = model_append(m, tokens, count, 0, NULL, f);
    double prefilled = clock_seconds();
    nsa_reads before = m->reads;
    for (int i = 0; ok && i < BENCH_TOKENS; i++)
        ok = model_append(m, tokens + count + i, 1, 1, g->logits, f);
    double end = clock_seconds(), dense = length - (BENCH_TOKENS - 1) / 2.0;
    free(tokens);
    if (!ok) return false;
    double keys = keys_read(m, &before, length - BENCH_TOKENS, BENCH_TOKENS, dense);
    printf("%8d %12.0f %12.0f %12.3f %10.1f %10.1f %8.1f\n", length, count / (prefilled - begin),
           BENCH_TOKENS / (end - prefilled), 1e3 * (end - prefilled) / BENCH_TOKENS, keys, dense,
           dense / keys);
    return files_end_output(f);
}

static bool bench(generator *g, fault *f) {
    int room = g->model.options.room;
    printf("%8s %12s %12s %12s %10s %10s %8s\n", "tokens", "prompt tok/s", "text tok/s",
           "ms a token", "keys read", "dense", "fewer");
    int length = room;
    while (length / 2 >= 8 * BENCH_TOKENS) length /= 2;
    for (; length <= room; length *= 2)
        if (!bench_length(g, length, f)) return false;
    return true;
}

int main(int argc, char **argv) {
    threads_wait_asleep(argv);
    static generator g;
    fault f;
    option_outcome outcome = options_read(&g.options, argc, argv, &f);
    if (outcome == OPTION_HELP) return 0;
    int code = 0;
    if (outcome == OPTION_ERROR || !open_generator(&g, &f))
        code = 2;
    else if (!(g.options.bench ? bench(&g, &f) : generate(&g, &f)))
        code = 1;
    if (code) fprintf(stderr, "%s\n", f.text);
    close_generator(&g);
    return code;
}
