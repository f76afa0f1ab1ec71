/* test_checked_once.c - a call checks its descriptor once, at the public entry point, and plans
   each branch once; below it arguments are trusted. The compiler counts: nsa.h is compiled into
   this program with -finstrument-functions, which calls the hook below when a function is entered.
   Not here: what is checked (tests/harness/refusals.h). */
#define NSA_IMPLEMENTATION
#include "harness/check.h"
#include "nsa.h"

enum { TOKENS = 96, HEADS = 4, KV_HEADS = 2, DIM = 16, MOST = 1 << 16 };

static int checks, plans;

__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void *function, void *caller);
__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void *function, void *caller);

void __cyg_profile_func_enter(void *function, void *caller) {
    (void)caller;
    checks += function == (void *)(size_t)nsa__check_geometry;
    plans += function == (void *)(size_t)nsa__attend_plan_of;
}

void __cyg_profile_func_exit(void *function, void *caller) {
    (void)function, (void)caller;
}

/* What a call entered since the last one: checks of a descriptor, and plans of branches. */
#define ENTERED(status, expected_checks, expected_plans)                                \
    do {                                                                                \
        checks = plans = 0;                                                             \
        nsa_status entered = (status);                                                  \
        CHECK(entered == NSA_OK, "%s", nsa_status_text(entered));                       \
        CHECK(checks == (expected_checks) && plans == (expected_plans),                 \
              "%d checks of the descriptor and %d plans, not %d and %d", checks, plans, \
              (expected_checks), (expected_plans));                                     \
    } while (0)

/* The same for a size query. */
#define SIZED(bytes, size, expected_plans) \
    ENTERED((((bytes) = (size)) ? NSA_OK : NSA_ERROR_SIZE), 1, expected_plans)

static float *pool_next;

static nsa_tensor rows(int tokens, int heads, int width) {
    nsa_tensor x = nsa_tensor_bthd(pool_next, NSA_F32, tokens, heads, width);
    for (int i = 0; i < tokens * heads * width; i++) *pool_next++ = (float)(i * 37 % 101) / 101;
    return x;
}

static nsa_compress mean(int width) {
    nsa_compress x;
    memset(&x, 0, sizeof x);
    x.dim = width;
    x.x = rows(TOKENS, KV_HEADS, width);
    x.out = rows(TOKENS, KV_HEADS, width);
    return x;
}

static nsa_attention chain(int32_t *blocks, const nsa_desc *d) {
    nsa_attention x;
    memset(&x, 0, sizeof x);
    x.q = rows(TOKENS, HEADS, DIM);
    x.k_cmp = mean(DIM);
    x.v_cmp = mean(DIM);
    x.k_slc = x.k_win = rows(TOKENS, KV_HEADS, DIM);
    x.v_slc = x.v_win = rows(TOKENS, KV_HEADS, DIM);
    x.gates = rows(TOKENS, HEADS, 3);
    x.blocks = nsa_tensor_bthd(blocks, NSA_I32, TOKENS, KV_HEADS, nsa_block_list_width(d));
    nsa_tensor *outs[] = {&x.out_cmp, &x.out_slc, &x.out_win, &x.out};
    nsa_tensor *lses[] = {&x.lse_cmp, &x.lse_slc, &x.lse_win};
    for (int i = 0; i < 4; i++) *outs[i] = rows(TOKENS, HEADS, DIM);
    for (int i = 0; i < 3; i++) *lses[i] = rows(TOKENS, HEADS, 1);
    return x;
}

static void test_chain(const nsa_attention *x, const nsa_attention *dx, const nsa_desc *d,
                       void *work) {
    size_t bytes;
    check_case("chain");
    SIZED(bytes, nsa_attention_forward_workspace_size(x, d), 3);
    ENTERED(nsa_attention_forward(x, d, work, bytes), 1, 3);
    SIZED(bytes, nsa_attention_backward_workspace_size(dx, x, d), 3);
    /* the room that the heads at hand need is asked for once; then these heads are planned */
    ENTERED(nsa_attention_backward(dx, x, d, work, bytes), 1, 3 + 3);
}

static void test_branches(const nsa_attention *x, const nsa_attention *dx, const nsa_desc *d,
                          void *work) {
    nsa__chain views = nsa__chain_of(x);
    nsa_attend dslc;
    size_t bytes;
    memset(&dslc, 0, sizeof dslc);
    dslc.out = dx->out;
    dslc.q = dx->q;
    check_case("branches");
    SIZED(bytes, nsa_attend_slc_forward_workspace_size(d), 1);
    ENTERED(nsa_attend_slc_forward(&views.slc, d, work, bytes), 1, 1);
    SIZED(bytes, nsa_attend_slc_backward_workspace_size(d), 1);
    ENTERED(nsa_attend_slc_backward(&dslc, &views.slc, d, work, bytes), 1, 1);
    SIZED(bytes, nsa_select_blocks_workspace_size(d), 1);
    ENTERED(nsa_select_blocks(&views.select, d, work, bytes), 1, 1);
    SIZED(bytes, nsa_compress_forward_workspace_size(&x->k_cmp, d), 0);
    ENTERED(nsa_compress_forward(&x->k_cmp, d, work, bytes), 1, 0);
    ENTERED(nsa_gate_forward(&views.gate, d), 1, 0);
}

/* A token at a time; the task that a thread runs plans its own branches, and checks nothing. */
static void test_decode(const nsa_attention *x, const nsa_desc *d, void *memory, void *work) {
    nsa_cache cache;
    size_t bytes;
    check_case("decode");
    SIZED(bytes, nsa_cache_size(d, NSA_F32, 3), 0);
    ENTERED(nsa_cache_init(&cache, d, NSA_F32, 3, memory, bytes), 1, 0);
    for (int t = 0; t < 40; t++) {
        SIZED(bytes, nsa_decode_workspace_size(x, &cache, 1), 6);
        ENTERED(nsa_decode(x, &cache, 1, NULL, NULL, work, bytes), 1, 3 + 3 * KV_HEADS);
    }
}

int main(void) {
    nsa_desc d = nsa_desc_default(1, TOKENS, HEADS, KV_HEADS, DIM);
    d.slc_count = 3;
    d.threads = 1;
    size_t bytes = (size_t)1 << 24;
    float *pool = (float *)check_alloc(4 * (size_t)MOST * sizeof *pool);
    int32_t *blocks = (int32_t *)check_alloc(MOST * sizeof *blocks);
    void *work = check_alloc(bytes), *memory = check_alloc(bytes);
    pool_next = pool;
    nsa_attention x = chain(blocks, &d), dx;
    memset(&dx, 0, sizeof dx);
    dx.out = rows(TOKENS, HEADS, DIM);
    dx.q = rows(TOKENS, HEADS, DIM);
    test_chain(&x, &dx, &d, work);
    test_branches(&x, &dx, &d, work);
    test_decode(&x, &d, memory, work);
    free(pool);
    free(blocks);
    free(work);
    free(memory);
    return check_done("test_checked_once");
}
