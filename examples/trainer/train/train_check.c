/* train_check.c - what a configuration means before anything is trained. Twin: train.h. */
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "base/text.h"
#include "train/train_inside.h"

/* Tokens of the selected blocks of query t; its own block, always among them, ends at t. */
static int64_t selected(const nsa_desc *d, int t) {
    int candidates = nsa_slc_candidates(d, t);
    int blocks = candidates < d->slc_count ? candidates : d->slc_count;
    return (int64_t)(blocks - 1) * d->slc_block + t % d->slc_block + 1;
}

/* Keys that query t reads in a layer of this kind, by branch; dense layers as a window. */
static void count_keys(const nsa_desc *d, attention_kind kind, int t, int64_t keys[3]) {
    bool sparse = attention_is_sparse(kind);
    keys[0] = sparse ? nsa_cmp_visible(d, t) : 0;
    keys[1] = sparse ? selected(d, t) : 0;
    keys[2] = kind == ATTENTION_CMP_SLC ? 0
              : kind == ATTENTION_FULL  ? t + 1
                                        : t - nsa_window_begin(d, t) + 1;
}

static void print_keys(const nsa_desc *d, const char *name, attention_kind kind) {
    int last = d->tokens - 1;
    int64_t keys[3] = {0}, sum = 0, dense = (int64_t)d->tokens * (d->tokens + 1) / 2;
    for (int t = 0; t < d->tokens; t++) {
        count_keys(d, kind, t, keys);
        sum += keys[0] + keys[1] + keys[2];
    }
    int64_t all = keys[0] + keys[1] + keys[2];
    printf("%skeys read by the last token of %d: %lld compressed + %lld selected + %lld %s = "
           "%lld (%.0f %% of dense)\n",
           name, d->tokens, (long long)keys[0], (long long)keys[1], (long long)keys[2],
           kind == ATTENTION_FULL ? "dense" : "window", (long long)all,
           100.0 * (double)all / (last + 1));
    printf("%skeys read by a token, mean: %.1f (dense: %.1f)\n", name, (double)sum / d->tokens,
           (double)dense / d->tokens);
}

/* By kind of layer, under its name where there are several. */
static void print_all_keys(const config *c, const model_config *m, const model_options *options,
                           const ops *o) {
    model shape = {.config = *m, .o = o};
    bool several = strchr(c->model.attention, ',') != NULL, done[ATTENTION_KINDS] = {false};
    for (int i = 0; i < m->n_layers; i++) {
        attention_kind kind = layer_kind(&shape, i);
        nsa_desc x = model_desc(&shape, i, options->batch, options->tokens);
        char name[32] = "";
        if (several) snprintf(name, sizeof name, "%s: ", config_attention_name(kind));
        if (!done[kind]) print_keys(&x, name, kind);
        done[kind] = true;
    }
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
    if (x) text_print_line(stdout, "data: %s", data_describe(x));
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
            train_note_snapshot(c, d, parameters, &sizes);
            print_sizes(&sizes, parameters);
            print_all_keys(c, &m, &options, o);
            ok = check_run(c, t, m.vocab, d, &f);
        }
    }
    bool told = !ok || files_end_output(&f);
    if (!ok || !told) fprintf(stderr, "%s\n", f.text);
    tokenizer_close(t);
    return !ok ? 2 : !told;
}
