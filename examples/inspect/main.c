/* main.c - inspect: what a checkpoint of either trainer reads of a text, layer by layer, as JSON.
   Twins: README.md; draw.py, which makes pictures and a page of it. What is measured is
   measure.c's; the model is the trainers' own and does not know that it is watched. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/text.h"
#include "base/threads.h"
#include "data/format.h"
#include "measure.h"
#include "train/restore.h"
#include "train/sample.h"

enum { LONGEST_TEXT = 1 << 24 };

typedef struct options {
    const char *checkpoint, *text, *prompt, *out, *tokenizer;
    int64_t tokens; /* of the text, from its start; 0: all */
} options;

typedef struct inspector {
    ops table; /* what the model is given: `inner`, but for mark. First, for mark gets only this */
    ops inner;
    options options;
    checkpoint checkpoint;
    tokenizer *tokenizer;
    token_list text;
    model model;
    real *logits;
    double *numbers, *keys; /* of one query: of its blocks, of its keys */
    files_draft draft;
    FILE *out; /* into it */
    bool watching, strange;
    int written; /* layers */
} inspector;

/* ---- What a layer reads ---------------------------------------------------------------------- */

static void write_numbers(inspector *n, const double *x, int count) {
    for (int i = 0; i < count; i++) {
        fprintf(n->out, "%s%.4g", i ? "," : "", x[i]);
        n->strange |= !isfinite(x[i]); /* JSON has no such number */
    }
}

static void write_blocks(FILE *out, const int32_t *list, int width) {
    for (int i = 0; i < width && list[i] >= 0; i++) fprintf(out, "%s%d", i ? "," : "", list[i]);
}

/* One line for each token: keys of the window, gates, list, scores, mass. */
static void write_query(inspector *n, const nsa_attention *x, const nsa_desc *d, bool has_window,
                        int t, int head) {
    const int32_t *list =
        (const int32_t *)x->blocks.data + t * x->blocks.token + head * x->blocks.head;
    int candidates = nsa_slc_candidates(d, t);
    double gates[BRANCHES];
    measure_gates(x, d, t, head, gates);
    fprintf(n->out, "%s{\"win\":%d,\"gates\":[", t ? ",\n" : "",
            has_window ? t + 1 - nsa_window_begin(d, t) : 0);
    write_numbers(n, gates, BRANCHES);
    fprintf(n->out, "],\"blocks\":[");
    write_blocks(n->out, list, nsa_block_list_width(d));
    fprintf(n->out, "],\"score\":[");
    measure_scores(x, d, t, head, n->numbers);
    write_numbers(n, n->numbers, candidates);
    fprintf(n->out, "],\"mass\":[");
    measure_mass(x, d, t, head, n->keys, n->numbers);
    write_numbers(n, n->numbers, candidates);
    fprintf(n->out, "]}");
}

/* A dense layer chooses nothing, and is left out. */
static void write_layer(inspector *n, int layer) {
    attention_kind kind = layer_kind(&n->model, layer);
    if (!attention_is_sparse(kind)) return;
    nsa_desc d = layer_desc(&n->model, layer);
    nsa_attention x = layer_views(&n->model, layer);
    fprintf(n->out, "%s[", n->written++ ? ",\n" : "");
    for (int head = 0; head < d.kv_heads; head++) {
        fprintf(n->out, "%s[", head ? ",\n" : "");
        for (int t = 0; t < d.tokens; t++) write_query(n, &x, &d, kind == ATTENTION_NSA, t, head);
        fprintf(n->out, "]");
    }
    fprintf(n->out, "]");
}

/* Called before each layer: the one before it has ended, and its arrays are not used again yet. */
static void mark(const ops *o, phase p, int layer) {
    inspector *n =
        (inspector *)(uintptr_t)o; /* the table is an inspector's first field, not const */
    if (n->watching && layer > 0) write_layer(n, layer - 1);
    n->inner.mark(&n->inner, p, layer);
}

/* ---- The command line ---------------------------------------------------------------------- */

static const option own[] = {
    {.flag = "--text",
     .kind = OPTION_TEXT,
     .offset = offsetof(options, text),
     .words = "FILE",
     .help = "the text; at most the model's context, train.seq_len"},
    {.flag = "--prompt",
     .kind = OPTION_TEXT,
     .offset = offsetof(options, prompt),
     .help = "the text itself"},
    {.flag = "--tokens",
     .kind = OPTION_INTEGER,
     .offset = offsetof(options, tokens),
     .min = 1,
     .max = LONGEST_TEXT,
     .help = "only the first N tokens of it; default: all"},
    {.flag = "--out",
     .kind = OPTION_TEXT,
     .offset = offsetof(options, out),
     .words = "FILE",
     .help = "where the JSON goes"},
    {.flag = "--tokenizer-path",
     .kind = OPTION_TEXT,
     .offset = offsetof(options, tokenizer),
     .words = "DIR",
     .help = "the folder of the tokenizer; default: the checkpoint's"},
};

static option_outcome read_options(options *o, int argc, char **argv, fault *f) {
    static const option_command command = {
        .name = "inspect",
        .summary = "what a model of train_tiny or train_125m reads of a text, as JSON for draw.py."
                   "\n\nCHECKPOINT is the folder of a checkpoint, or a run's out_dir, of which the "
                   "newest is taken.\n--out and either --text or --prompt must be given.",
        .words = "CHECKPOINT",
        .rows = own,
        .count = sizeof own / sizeof own[0],
    };
    const char *words[2];
    option_outcome outcome = option_read(&command, argc, argv, o, words, f);
    if (outcome != OPTION_OK) return outcome;
    o->checkpoint = words[0];
    if (!o->text == !o->prompt)
        fault_set(f, "give either --text FILE or --prompt TEXT");
    else if (!o->out)
        fault_set(f, "--out FILE.json: where shall the result go?");
    else
        return OPTION_OK;
    return OPTION_ERROR;
}

/* ---- Opening ------------------------------------------------------------------------------- */

static bool read_text(inspector *n, int vocab, fault *f) {
    const options *o = &n->options;
    char *file = NULL;
    size_t bytes = o->prompt ? strlen(o->prompt) : 0;
    if (o->text && !(file = files_read(o->text, LONGEST_TEXT, &bytes, f))) return false;
    const char *name = o->text ? o->text : "--prompt", *text = file ? file : o->prompt;
    bool ok = !file || format_prompt(name, &text, &bytes, f);
    ok = ok && (bytes > 0 || fault_set(f, "%s: the text is empty; at least one token", name));
    ok = ok && sample_prompt(n->tokenizer, text, bytes, vocab, &n->text, f);
    free(file);
    if (!ok) return false;
    if (o->tokens && (size_t)o->tokens < n->text.count) n->text.count = (size_t)o->tokens;
    long long context = n->checkpoint.config.train.seq_len;
    return (long long)n->text.count <= context ||
           fault_set(f,
                     "%s: %zu tokens; the model was trained with a context of %lld (--tokens %lld "
                     "takes the first ones)",
                     name, n->text.count, context, context);
}

static int sparse_layers(const config_model *m) {
    int count = 0;
    for (int64_t i = 0; i < m->n_layers; i++) count += attention_is_sparse(config_attention(m, i));
    return count;
}

static bool open_inspector(inspector *n, fault *f) {
    config *c = &n->checkpoint.config;
    if (!checkpoint_open(&n->checkpoint, n->options.checkpoint, f)) return false;
    if (!sparse_layers(&c->model))
        return fault_set(f,
                         "%s: trained with other attention than nsa: it reads every key that "
                         "it may, and there is nothing to inspect",
                         n->options.checkpoint);
    if (n->options.tokenizer && c->data.tokenizer == CONFIG_BYTE)
        return fault_set(f, "--tokenizer-path: has no effect: the tokens of %s are bytes",
                         n->options.checkpoint);
    const char *folder = n->options.tokenizer ? n->options.tokenizer : c->data.tokenizer_path;
    n->tokenizer = tokenizer_open(c->data.tokenizer, folder, f);
    if (!n->tokenizer || !restore_same_vocabulary(&n->checkpoint, n->tokenizer, folder, f))
        return false;
    int vocab = c->model.vocab_size ? (int)c->model.vocab_size : tokenizer_vocab_size(n->tokenizer);
    if (!read_text(n, vocab, f) || !ops_cpu_open(&n->inner, 0, f)) return false;
    n->table = n->inner;
    n->table.mark = mark;
    int count = (int)n->text.count;
    if (!restore_model(&n->model, &n->checkpoint, vocab, count, count, &n->table, f)) return false;
    n->logits = malloc((size_t)vocab * sizeof *n->logits);
    n->numbers = malloc((size_t)count * sizeof *n->numbers);
    n->keys = malloc((size_t)count * sizeof *n->keys);
    if (!n->logits || !n->numbers || !n->keys) return fault_set(f, "out of memory");
    if (!files_draft_open(&n->draft, n->options.out, f)) return false;
    n->out = fdopen(dup(n->draft.fd), "w");
    return n->out || (fault_set(f, "out of memory"), files_draft_close(&n->draft, false, f));
}

/* ---- Writing ------------------------------------------------------------------------------- */

/* The bytes of each token in hex: a token of GPT-2's vocabulary may be half a character. */
static void write_text(const inspector *n) {
    for (size_t i = 0; i < n->text.count; i++) {
        size_t bytes;
        const char *text = tokenizer_bytes(n->tokenizer, n->text.ids[i], &bytes);
        fprintf(n->out, "%s\"", i ? "," : "");
        for (size_t c = 0; c < bytes; c++) fprintf(n->out, "%02x", (unsigned char)text[c]);
        fprintf(n->out, "\"");
    }
}

static void write_geometry(const inspector *n, const nsa_desc *d) {
    const config_model *c = &n->checkpoint.config.model;
    const struct {
        const char *name;
        int value;
    } sizes[] = {{"tokens", d->tokens},
                 {"layers", sparse_layers(c)},
                 {"heads", d->heads},
                 {"kv_heads", d->kv_heads},
                 {"cmp_block", d->cmp_block},
                 {"cmp_stride", d->cmp_stride},
                 {"slc_block", d->slc_block},
                 {"slc_count", d->slc_count},
                 {"slc_init", d->slc_init},
                 {"slc_local", d->slc_local},
                 {"window", (int)n->checkpoint.config.nsa.w}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        fprintf(n->out, "\"%s\":%d,", sizes[i].name, sizes[i].value);
    fprintf(n->out, "\"step\":%lld,\"numbers\":[", (long long)n->checkpoint.state.step);
    for (int i = 0, count = 0; i < c->n_layers; i++)
        if (attention_is_sparse(config_attention(c, i)))
            fprintf(n->out, "%s%d", count++ ? "," : "", i);
    fprintf(n->out, "],");
}

/* The text twice: whole, to be watched, and through the caches, where the library counts reads. */
static bool inspect(inspector *n, fault *f) {
    model *m = &n->model;
    int count = (int)n->text.count;
    nsa_desc d = model_desc(m, 0, 1, count);
    fprintf(n->out, "{");
    write_geometry(n, &d);
    fprintf(n->out, "\"text\":[");
    write_text(n);
    fprintf(n->out, "],\n\"queries\":[");
    n->watching = true;
    bool ok = model_next(m, n->text.ids, count, n->logits, f);
    n->watching = false;
    if (ok) write_layer(n, m->config.n_layers - 1);
    if (ok && n->strange)
        ok = fault_set(f,
                       "%s: the model's gates or scores are no numbers: its weights are not "
                       "finite, or too large",
                       n->checkpoint.path);
    ok = ok && model_restart(m, f) && model_append(m, n->text.ids, count, 0, NULL, f);
    fprintf(n->out, "],\n\"counted\":{\"cmp\":%lld,\"slc\":%lld,\"win\":%lld}}\n",
            (long long)m->reads.cmp, (long long)m->reads.slc, (long long)m->reads.win);
    bool failed = ferror(n->out) != 0;
    failed |= fclose(n->out) != 0;
    n->out = NULL;
    if (ok && failed) ok = fault_errno(f, "%s: cannot write", n->options.out);
    ok = files_draft_close(&n->draft, ok, f);
    if (ok)
        text_print_line(stdout,
                        "wrote %s: %d tokens, %d layers; examples/inspect/draw.py makes pictures "
                        "of it",
                        n->options.out, count, n->written);
    return ok;
}

static void close_inspector(inspector *n) {
    if (n->model.o) model_close(&n->model);
    if (n->inner.state) ops_cpu_close(&n->inner);
    checkpoint_close(&n->checkpoint);
    tokenizer_close(n->tokenizer);
    token_list_free(&n->text);
    free(n->logits);
    free(n->numbers);
    free(n->keys);
}

int main(int argc, char **argv) {
    files_claim_standard();
    threads_wait_asleep(argv);
    static inspector n;
    fault f;
    option_outcome outcome = read_options(&n.options, argc, argv, &f);
    if (outcome == OPTION_HELP) return 0;
    int code = 0;
    if (outcome == OPTION_ERROR || !open_inspector(&n, &f))
        code = 2;
    else if (!inspect(&n, &f))
        code = 1;
    if (code) fprintf(stderr, "inspect: %s\n", f.text);
    close_inspector(&n);
    return code;
}
