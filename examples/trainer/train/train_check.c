/* train_check.c - what a configuration means before anything is trained. Twin: train.h. */
#include <string.h>
#include <sys/stat.h>

#include "train/train_inside.h"

/* Tokens of the selected blocks of query t; its own block, always among them, ends at t. */
static int64_t selected(const nsa_desc *d, int t) {
    int candidates = nsa_slc_candidates(d, t);
    int blocks = candidates < d->slc_count ? candidates : d->slc_count;
    return (int64_t)(blocks - 1) * d->slc_block + t % d->slc_block + 1;
}

static void print_keys(const nsa_desc *d) {
    int last = d->tokens - 1;
    int64_t sum = 0, dense = (int64_t)d->tokens * (d->tokens + 1) / 2;
    int64_t cmp = nsa_cmp_visible(d, last), slc = selected(d, last);
    int64_t win = last - nsa_window_begin(d, last) + 1;
    for (int t = 0; t < d->tokens; t++)
        sum += nsa_cmp_visible(d, t) + selected(d, t) + t - nsa_window_begin(d, t) + 1;
    printf("keys read by the last token of %d: %lld compressed + %lld selected + %lld window = "
           "%lld (%.0f %% of dense)\n",
           d->tokens, (long long)cmp, (long long)slc, (long long)win, (long long)(cmp + slc + win),
           100.0 * (double)(cmp + slc + win) / d->tokens);
    printf("keys read by a token, mean: %.1f (dense: %.1f)\n", (double)sum / d->tokens,
           (double)dense / d->tokens);
}

static void print_sizes(const arena *a, int64_t parameters) {
    printf("parameters: %lld\nmemory, MiB:\n", (long long)parameters);
    for (int i = 0; i < PURPOSES; i++)
        printf("  %-13s %10.1f\n", purpose_name((purpose)i), (double)a->by_purpose[i] / (1 << 20));
    printf("  %-13s %10.1f\n", "all", (double)a->used / (1 << 20));
}

/* A pipe gives what it has once. */
static bool is_pipe(const config_data *c) {
    struct stat s;
    if (c->dataset == CONFIG_FINEWEB && !c->path[0]) return true;
    return !strcmp(c->path, "-") ||
           (c->path[0] && !stat(c->path, &s) && !S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode));
}

/* What the run would refuse before its first step: its folder, its data. */
static bool check_run(const config *c, tokenizer *t, int64_t vocab, const dist *d, fault *f) {
    data_options options = train_data_options(c, t, vocab, d);
    options.notes = listener_stderr();
    fflush(stdout);
    if (!telemetry_check_folder(c, f)) return false;
    if (is_pipe(&c->data)) {
        printf("data: a pipe, which is not read here\n");
        return true;
    }
    data *x = data_open(&options, f);
    if (x) printf("data: %s\n", data_describe(x));
    data_close(x);
    return x != NULL;
}

int train_check(const config *c, const ops *o, dist *d) {
    fault f;
    arena sizes;
    int64_t parameters;
    tokenizer *t = tokenizer_open(c->data.tokenizer, c->data.tokenizer_path, &f);
    bool ok = t != NULL;
    if (ok) {
        model_config m = train_model_config(c, tokenizer_vocab_size(t));
        model_options options = train_model_options(c, d);
        config_print(c, stdout);
        ok = model_measure(&m, &options, o, &sizes, &parameters, &f);
        if (ok) {
            model shape = {.config = m, .o = o};
            nsa_desc x = model_desc(&shape, options.batch, options.tokens);
            train_note_snapshot(c, d, parameters, &sizes);
            print_sizes(&sizes, parameters);
            if (!m.full) print_keys(&x);
            ok = check_run(c, t, m.vocab, d, &f);
        }
    }
    if (!ok) fprintf(stderr, "%s\n", f.text);
    tokenizer_close(t);
    return ok ? 0 : 2;
}
