/* test_append.c - decoding a model from its caches: whatever the chunks, logits, tokens and block
   numbers are the bits of the whole sequence's forward; keys are counted; refusals leave the caches
   as they were. Twin: model.c. Built with the plain products of gemm.c, of which a row does not
   depend on the other rows; a BLAS's may, for which test_append_blas, this file too, allows
   1e-4. */
#include <stdlib.h>
#include <string.h>

#include "model_test.h"

enum { TOKENS = 100, VOCAB = 64, LAYERS = 2, GROUPS = 2 };

static int32_t tokens[TOKENS], unused[TOKENS];

/* Longer than its window, not a multiple of its blocks, with blocks to choose from. */
static model_config small(void) {
    return tinylm(VOCAB, 32, LAYERS, 4, GROUPS, 8, 12, 8, 4, 16, 4, 24);
}

typedef struct variant {
    const char *name;
    nsa_phi phi;
    attention_kind attention[LAYERS];
    nsa_rope_scaling scaling;
    bool qk_norm;
    bool llama; /* one k and v, a linear gate, swiglu */
} variant;

static const variant variants[] = {
    {"mean", NSA_PHI_MEAN, {ATTENTION_NSA, ATTENTION_NSA}, NSA_ROPE_SCALING_NONE, false, false},
    {"conv, linear",
     NSA_PHI_CONV,
     {ATTENTION_NSA, ATTENTION_NSA},
     NSA_ROPE_SCALING_LINEAR,
     false,
     false},
    {"mlp, yarn", NSA_PHI_MLP, {ATTENTION_NSA, ATTENTION_NSA}, NSA_ROPE_SCALING_YARN, false, false},
    {"full", NSA_PHI_MEAN, {ATTENTION_FULL, ATTENTION_FULL}, NSA_ROPE_SCALING_NONE, false, false},
    {"window, ntk",
     NSA_PHI_MEAN,
     {ATTENTION_WINDOW, ATTENTION_WINDOW},
     NSA_ROPE_SCALING_NTK,
     false,
     false},
    {"window and cmp+slc",
     NSA_PHI_MEAN,
     {ATTENTION_WINDOW, ATTENTION_CMP_SLC},
     NSA_ROPE_SCALING_NONE,
     false,
     false},
    {"nsa and full, norm of q and k",
     NSA_PHI_CONV,
     {ATTENTION_NSA, ATTENTION_FULL},
     NSA_ROPE_SCALING_NONE,
     true,
     false},
    {"llama", NSA_PHI_MEAN, {ATTENTION_NSA, ATTENTION_NSA}, NSA_ROPE_SCALING_NONE, false, true},
};

static model_config config_of(const variant *v) {
    model_config c = small();
    c.phi = v->phi;
    for (int i = 0; i < LAYERS; i++) c.attention[i] = (unsigned char)v->attention[i];
    c.rope_scaling = v->scaling;
    c.qk_norm = v->qk_norm;
    c.rope_factor = v->scaling == NSA_ROPE_SCALING_NONE ? 1 : 4;
    c.rope_trained_context = 32;
    c.shared_kv = c.gate_linear = c.swiglu = v->llama;
    return c;
}

/* `training` gives each layer activations of its own, among them its block numbers. */
static bool open(model *m, const model_config *c, int chunk, int room, const ops *o) {
    model_options options = {.batch = 1, .tokens = chunk, .training = true, .room = room};
    if (!CHECK(model_open(m, c, &options, o, 1, &why), "%s", why.text)) return false;
    enlarge(m, 4);
    return true;
}

static void compare_blocks(const model *got, const model *want, int first, int count, int width) {
    for (int i = 0; i < LAYERS; i++)
        CHECK(!attention_is_sparse(layer_kind(got, i)) ||
                  !memcmp(got->acts[i].blocks, want->acts[i].blocks + first * GROUPS * width,
                          (size_t)(count * GROUPS * width) * sizeof(int32_t)),
              "layer %d: block numbers of tokens %d .. %d differ", i, first, first + count - 1);
}

static int likeliest(const real *logits) {
    int best = 0;
    for (int i = 1; i < VOCAB; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static void compare_logits(const real *got, const real *want, const char *what) {
#ifdef NSA_TEST_BLAS
    double most = 0, scale = 0;
    for (int i = 0; i < VOCAB; i++) {
        double x = fabs((double)want[i]), d = fabs((double)got[i] - (double)want[i]);
        if (x > scale) scale = x;
        if (!(d <= most)) most = d;
    }
    CHECK(most <= 1e-4 * scale, "%s: off by %g of %g", what, most, scale);
#else
    CHECK_BITS(what, got, want, VOCAB * sizeof(real), sizeof(real));
#endif
}

/* What a fresh model makes of each prefix of the tokens. */
static real *forward_each(const model_config *c, const ops *o, model *whole) {
    real *logits = malloc((size_t)TOKENS * VOCAB * sizeof *logits);
    if (!CHECK(logits != NULL, "out of memory") || !open(whole, c, TOKENS, 0, o)) return NULL;
    for (int t = 0; t < TOKENS; t++)
        CHECK(model_next(whole, tokens, t + 1, logits + t * VOCAB, &why), "%s", why.text);
    return logits;
}

/* The caches' rows in chunks of `chunk`, then one by one from `prompt` on. */
static void test_chunks(const variant *v, const model_config *c, const model *whole,
                        const real *want, int chunk, int prompt, const ops *o) {
    model m;
    static real logits[TOKENS * VOCAB];
    int width = c->n_sel;
    check_case("%s, prompt of %d in chunks of %d", v->name, prompt, chunk);
    if (!open(&m, c, chunk, TOKENS, o)) return;
    CHECK(model_append(&m, tokens, prompt, prompt, logits, &why), "%s", why.text);
    for (int t = 0; t < prompt; t++)
        compare_logits(logits + t * VOCAB, want + t * VOCAB, "logits of the prompt");
    int last = (prompt - 1) / chunk * chunk;
    compare_blocks(&m, whole, last, prompt - last, width);
    for (int t = prompt; t < TOKENS; t++) {
        CHECK(model_append(&m, tokens + t, 1, 1, logits, &why), "%s", why.text);
        compare_logits(logits, want + t * VOCAB, "logits of a token");
        CHECK(likeliest(logits) == likeliest(want + t * VOCAB), "token %d: another token", t);
        compare_blocks(&m, whole, t, 1, width);
    }
    CHECK(m.past == TOKENS, "%d tokens held", m.past);
    model_close(&m);
}

static void test_variant(const variant *v, const ops *o) {
    static const int chunks[][2] = {{1, 1}, {7, 60}, {32, 32}, {TOKENS, TOKENS - 1}};
    model whole;
    model_config c = config_of(v);
    check_case("%s", v->name);
    real *want = forward_each(&c, o, &whole);
    if (!want) return;
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++)
        test_chunks(v, &c, &whole, want, chunks[i][0], chunks[i][1], o);
    model_close(&whole);
    free(want);
}

/* The counts are those of the rules: compressed rows seen, tokens of the lists, the window. */
static void test_reads(const ops *o) {
    model m;
    model_config c = small();
    check_case("reads");
    if (!open(&m, &c, 8, TOKENS, o)) return;
    nsa_reads want = {0};
    nsa_desc d = model_desc(&m, 0, 1, TOKENS);
    for (int t = 0; t < TOKENS; t++) {
        int candidates = nsa_slc_candidates(&d, t);
        int blocks = candidates < c.n_sel ? candidates : c.n_sel;
        want.cmp += nsa_cmp_visible(&d, t);
        want.slc += (blocks - 1) * c.l_sel + t % c.l_sel + 1;
        want.win += t - nsa_window_begin(&d, t) + 1;
    }
    CHECK(model_append(&m, tokens, TOKENS, 0, NULL, &why), "%s", why.text);
    int64_t times = LAYERS * GROUPS;
    CHECK(m.reads.cmp == times * want.cmp && m.reads.slc == times * want.slc &&
              m.reads.win == times * want.win,
          "read %lld %lld %lld, not %lld times %lld %lld %lld", (long long)m.reads.cmp,
          (long long)m.reads.slc, (long long)m.reads.win, (long long)times, (long long)want.cmp,
          (long long)want.slc, (long long)want.win);
    model_close(&m);
}

/* A refusal appends nothing; a restart forgets all. */
static void test_refusals(const ops *o) {
    model m;
    model_config c = small();
    real first[VOCAB], again[VOCAB];
    check_case("refusals");
    if (!open(&m, &c, 8, 20, o)) return;
    CHECK(model_append(&m, tokens, 15, 1, first, &why), "%s", why.text);
    CHECK(!model_append(&m, tokens + 15, 6, 1, again, &why) && strstr(why.text, "room for 20"),
          "a prompt beyond the room: %s", why.text);
    CHECK(!model_append(&m, tokens, 0, 0, NULL, &why), "no token");
    CHECK(!model_append(&m, tokens, 1, 2, again, &why), "more logits than tokens");
    CHECK(m.past == 15, "%d tokens held after refusals", m.past);
    CHECK(model_append(&m, tokens + 15, 5, 1, again, &why), "%s", why.text);
    CHECK(model_restart(&m, &why) && m.past == 0 && m.reads.win == 0, "restart: %s", why.text);
    CHECK(model_append(&m, tokens, 15, 1, again, &why), "%s", why.text);
    CHECK_BITS("after a restart", again, first, sizeof first, sizeof(real));
    model_close(&m);
    ops blind = *o;
    blind.decode = NULL;
    model_options options = {.batch = 1, .tokens = 8, .room = 20};
    CHECK(!model_open(&m, &c, &options, &blind, 1, &why) && strstr(why.text, "does not decode"),
          "a back end without decoding: %s", why.text);
}

int main(void) {
    ops o = open_ops(2);
    random_tokens(tokens, unused, 1, TOKENS, VOCAB, 0);
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) test_variant(&variants[i], &o);
    test_reads(&o);
    test_refusals(&o);
    ops_cpu_close(&o);
    return check_done("test_append");
}
