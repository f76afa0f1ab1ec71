/* test_threads.c - backward, whose tasks are ordered, under every way of having threads: more than
   there are, fewer than asked for, in nested regions, on the caller's own, with one that does not
   come back for long.
   Twin: nsa.h's "ordered tasks". Not here: whether the numbers are right, which the tests
   of the primitives say for one thread; here all others must give the same bits.

   CMake runs it with OpenMP's limits in the environment too, and test_threads.sh with other
   compilers, whose OpenMP is another, and without OpenMP. */
#define NSA_IMPLEMENTATION
#define NSA_STATIC
#include "nsa.h"

#include "harness/check.h"
#include <pthread.h>

/* Few threads take four key-value heads at once and then two, many take all six. */
enum { T = 700, H = 12, HK = 6, D = 16, B = 2, CALLERS = 3 };
enum { Q = B * T * H * D, K = B * T * HK * D, GATES = B * T * H * 3 };

/* The chain and dense attention, with what they have given. */
typedef struct problem {
    nsa_desc d;
    nsa_attention x, dx;
    nsa_attend dense, ddense;
    float *given[5]; /* dq, dk, dv, dgates of the chain and dense together, out */
    float *owned[32];
    int owns;
} problem;

static const size_t sizes[5] = {Q, K, K, GATES, Q};

static nsa_tensor take(problem *p, int rows, int heads, int width, uint64_t seed) {
    size_t n = (size_t)B * (size_t)rows * (size_t)heads * (size_t)width;
    float *data = (float *)calloc(n, sizeof *data);
    for (size_t i = 0; seed && i < n; i++) data[i] = (float)check_normal(seed, i);
    p->owned[p->owns++] = data;
    return nsa_tensor_bthd(data, NSA_F32, rows, heads, width);
}

static nsa_compress mean_of(nsa_tensor x, nsa_tensor out, int dim) {
    nsa_compress c;
    memset(&c, 0, sizeof c);
    c.phi = NSA_PHI_MEAN;
    c.dim = dim;
    c.x = x;
    c.out = out;
    return c;
}

static void problem_make_as(problem *p, int tokens, int heads, int kv_heads, int dim) {
    memset(p, 0, sizeof *p);
    nsa_desc *d = &p->d;
    *d = nsa_desc_default(B, tokens, heads, kv_heads, dim);
    d->cmp_block = 8, d->cmp_stride = 4, d->slc_block = 16, d->slc_count = 5, d->window = 70;
    nsa_tensor k = take(p, tokens, kv_heads, dim, 2), v = take(p, tokens, kv_heads, dim, 3);
    int cmp = nsa_cmp_count(d, tokens);
    p->x.q = take(p, tokens, heads, dim, 1);
    p->x.k_slc = p->x.k_win = k;
    p->x.v_slc = p->x.v_win = v;
    p->x.k_cmp = mean_of(k, take(p, cmp, kv_heads, dim, 0), dim);
    p->x.v_cmp = mean_of(v, take(p, cmp, kv_heads, dim, 0), dim);
    p->x.gates = take(p, tokens, heads, 3, 4);
    p->x.blocks = take(p, tokens, kv_heads, nsa_block_list_width(d), 0);
    p->x.blocks.dtype = NSA_I32;
    nsa_tensor *outs[] = {&p->x.out_cmp, &p->x.out_slc, &p->x.out_win, &p->x.out, &p->dense.out};
    nsa_tensor *lses[] = {&p->x.lse_cmp, &p->x.lse_slc, &p->x.lse_win, &p->dense.lse};
    for (int i = 0; i < 5; i++) *outs[i] = take(p, tokens, heads, dim, 0);
    for (int i = 0; i < 4; i++) *lses[i] = take(p, tokens, heads, 1, 0);
    p->dense.q = p->x.q;
    p->dense.k = k;
    p->dense.v = v;
    p->dx.q = p->ddense.q = take(p, tokens, heads, dim, 0);
    p->dx.k_slc = p->dx.k_win = p->dx.k_cmp.x = p->ddense.k = take(p, tokens, kv_heads, dim, 0);
    p->dx.v_slc = p->dx.v_win = p->dx.v_cmp.x = p->ddense.v = take(p, tokens, kv_heads, dim, 0);
    p->dx.gates = take(p, tokens, heads, 3, 0);
    p->dx.out = p->ddense.out = take(p, tokens, heads, dim, 5);
    p->given[0] = (float *)p->dx.q.data;
    p->given[1] = (float *)p->dx.k_slc.data;
    p->given[2] = (float *)p->dx.v_slc.data;
    p->given[3] = (float *)p->dx.gates.data;
    p->given[4] = (float *)p->x.out.data;
}

static void problem_make(problem *p) {
    problem_make_as(p, T, H, HK, D);
}

static void problem_free(problem *p) {
    for (int i = 0; i < p->owns; i++) free(p->owned[i]);
}

static size_t most_bytes(const problem *p) {
    const size_t bytes[] = {nsa_attention_forward_workspace_size(&p->x, &p->d),
                            nsa_attention_backward_workspace_size(&p->dx, &p->x, &p->d),
                            nsa_attend_dense_forward_workspace_size(&p->d),
                            nsa_attend_dense_backward_workspace_size(&p->d)};
    size_t most = 0;
    for (int i = 0; i < 4; i++) most = bytes[i] > most ? bytes[i] : most;
    return most;
}

/* Everything once, by so many threads. */
static nsa_status run_all(problem *p, int threads) {
    p->d.threads = threads;
    for (int i = 0; i < 4; i++) memset(p->given[i], 0, sizes[i] * sizeof(float));
    size_t bytes = most_bytes(p);
    void *workspace = malloc(bytes);
    nsa_status s = nsa_attention_forward(&p->x, &p->d, workspace, bytes);
    if (s == NSA_OK) s = nsa_attention_backward(&p->dx, &p->x, &p->d, workspace, bytes);
    if (s == NSA_OK) s = nsa_attend_dense_forward(&p->dense, &p->d, workspace, bytes);
    if (s == NSA_OK) s = nsa_attend_dense_backward(&p->ddense, &p->dense, &p->d, workspace, bytes);
    free(workspace);
    return s;
}

static problem want; /* by one thread */

static void compare(const problem *got, nsa_status s) {
    static const char *const names[] = {"dq", "dk", "dv", "dgates", "out"};
    CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
    for (int i = 0; i < 5; i++)
        CHECK_BITS(names[i], got->given[i], want.given[i], sizes[i] * sizeof(float), sizeof(float));
}

static void test_numbers_of_threads(const char *how) {
    static const int threads[] = {2, 3, 7, 16, 200, 0};
    problem p;
    problem_make(&p);
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        check_case("%s, threads %d", how, threads[i]);
        nsa_status s = run_all(&p, threads[i]);
        compare(&p, s);
    }
    problem_free(&p);
}

/* out and the lists of more heads than there are head slots, by several threads. */
static void test_heads_at_once(void) {
    enum { TOKENS = 2100, HEADS = 5, WIDE = 64, THREADS = 3 };
    const size_t out = (size_t)B * TOKENS * HEADS * WIDE * sizeof(float);
    problem p[THREADS];
    for (int i = 0; i < THREADS; i++) {
        problem_make_as(&p[i], TOKENS, HEADS, HEADS, WIDE);
        p[i].d.threads = i + 1;
        check_case("heads at once by %d threads", i + 1);
        size_t bytes = most_bytes(&p[i]);
        void *workspace = malloc(bytes);
        nsa_status s = nsa_attention_forward(&p[i].x, &p[i].d, workspace, bytes);
        if (s == NSA_OK) s = nsa_attend_dense_forward(&p[i].dense, &p[i].d, workspace, bytes);
        CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
        free(workspace);
        const size_t lists =
            (size_t)B * TOKENS * HEADS * sizeof(int32_t) * (size_t)nsa_block_list_width(&p[i].d);
        CHECK_BITS("out", p[i].x.out.data, p[0].x.out.data, out, sizeof(float));
        CHECK_BITS("dense", p[i].dense.out.data, p[0].dense.out.data, out, sizeof(float));
        CHECK_BITS("blocks", p[i].x.blocks.data, p[0].x.blocks.data, lists, sizeof(int32_t));
    }
    for (int i = 0; i < THREADS; i++) problem_free(&p[i]);
}

/* A workspace that was sized for fewer threads than the machine offers now. */
static void test_less_room(void) {
    problem p;
    problem_make(&p);
    p.d.threads = 1;
    size_t bytes = nsa_attend_dense_backward_workspace_size(&p.d);
    void *workspace = malloc(bytes);
    check_case("room for one thread");
    nsa_status s = run_all(&p, 1);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    float *dk = (float *)malloc(K * sizeof *dk);
    memset(p.given[1], 0, K * sizeof *dk);
    p.d.threads = 1;
    s = nsa_attend_dense_backward(&p.ddense, &p.dense, &p.d, workspace, bytes);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    memcpy(dk, p.given[1], K * sizeof *dk);
    memset(p.given[1], 0, K * sizeof *dk);
    p.d.threads = 0;
    s = nsa_attend_dense_backward(&p.ddense, &p.dense, &p.d, workspace, bytes);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    CHECK_BITS("dk", p.given[1], dk, K * sizeof *dk, sizeof *dk);
    free(dk);
    free(workspace);
    problem_free(&p);
}

/* Calls at the same time, each in a thread of the caller's own. */
typedef struct caller {
    problem p;
    nsa_status status;
    int threads;
} caller;

static void *call(void *of) {
    caller *c = (caller *)of;
    c->status = run_all(&c->p, c->threads);
    return NULL;
}

static void test_callers(int threads) {
    static caller callers[CALLERS];
    pthread_t of[CALLERS];
    check_case("%d callers at once, threads %d", CALLERS, threads);
    for (int i = 0; i < CALLERS; i++) problem_make(&callers[i].p), callers[i].threads = threads;
    for (int i = 0; i < CALLERS; i++) {
        int failed = pthread_create(&of[i], NULL, call, &callers[i]);
        CHECK(!failed, "pthread_create: %d", failed);
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(of[i], NULL);
    for (int i = 0; i < CALLERS; i++) {
        compare(&callers[i].p, callers[i].status);
        problem_free(&callers[i].p);
    }
}

/* The caller's pool: each thread has the dense backward pass of one sequence and key-value head. */
typedef struct slice {
    const problem *p;
    int sequence, kv_head;
    nsa_status status;
} slice;

static nsa_tensor part_of(nsa_tensor x, int sequence, int head) {
    if (x.data)
        x.data = (char *)x.data + (size_t)(x.batch * sequence + x.head * head) * sizeof(float);
    return x;
}

static nsa_attend slice_of(const nsa_attend *x, int sequence, int kv_head) {
    nsa_attend part = *x;
    part.q = part_of(x->q, sequence, kv_head * (H / HK));
    part.k = part_of(x->k, sequence, kv_head);
    part.v = part_of(x->v, sequence, kv_head);
    part.out = part_of(x->out, sequence, kv_head * (H / HK));
    part.lse = part_of(x->lse, sequence, kv_head * (H / HK));
    return part;
}

static void *run_slice(void *of) {
    slice *s = (slice *)of;
    nsa_desc d = s->p->d;
    d.batch = d.kv_heads = d.threads = 1;
    d.heads = d.gate_heads = H / HK;
    nsa_attend x = slice_of(&s->p->dense, s->sequence, s->kv_head),
               dx = slice_of(&s->p->ddense, s->sequence, s->kv_head);
    size_t bytes = nsa_attend_dense_backward_workspace_size(&d);
    void *workspace = malloc(bytes);
    s->status = nsa_attend_dense_backward(&dx, &x, &d, workspace, bytes);
    free(workspace);
    return NULL;
}

static void test_pool(void) {
    static slice slices[B * HK];
    pthread_t of[B * HK];
    problem p;
    problem_make(&p);
    nsa_status s = run_all(&p, 1);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    float *whole[3];
    for (int i = 0; i < 3; i++) {
        whole[i] = (float *)malloc(sizes[i] * sizeof(float));
        memset(p.given[i], 0, sizes[i] * sizeof(float));
    }
    size_t bytes = nsa_attend_dense_backward_workspace_size(&p.d);
    void *workspace = malloc(bytes);
    s = nsa_attend_dense_backward(&p.ddense, &p.dense, &p.d, workspace, bytes);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    for (int i = 0; i < 3; i++) {
        memcpy(whole[i], p.given[i], sizes[i] * sizeof(float));
        memset(p.given[i], 0, sizes[i] * sizeof(float));
    }
    check_case("a pool's slices");
    for (int i = 0; i < B * HK; i++) {
        slices[i] = (slice){&p, i / HK, i % HK, NSA_OK};
        int failed = pthread_create(&of[i], NULL, run_slice, &slices[i]);
        CHECK(!failed, "pthread_create: %d", failed);
    }
    for (int i = 0; i < B * HK; i++) {
        pthread_join(of[i], NULL);
        CHECK(slices[i].status == NSA_OK, "%s", nsa_status_name(slices[i].status));
    }
    for (int i = 0; i < 3; i++) {
        CHECK_BITS("gradient", p.given[i], whole[i], sizes[i] * sizeof(float), sizeof(float));
        free(whole[i]);
    }
    free(workspace);
    problem_free(&p);
}

/* One thread has taken task `stalled` and does not come back while others find anything to do. They
   must get to do all that does not follow it, and the bits stay. */
static struct { int task, done, held; } stalled;

static void stalled_backward(nsa__head_job *jobs, const nsa__team *team) {
    nsa__ordered ordered = nsa__backward_ordered(jobs);
    ordered.tasks = (int32_t)nsa__query_tasks(jobs);
    nsa__ordered_begin(&ordered, team);
    nsa__task_slot *held = nsa__slot_at(&ordered, team, stalled.task);
    CHECK(nsa__claim(&held->claims), "task %d is free at first", stalled.task);
    for (int idle; nsa__step_slot(&ordered, team, team->scratch, &idle);) {
    }
    for (int i = 0; i < ordered.tasks; i++) stalled.done += ordered.progress[i] == INT32_MAX;
    stalled.held = ordered.progress[stalled.task] == INT32_MAX;
    nsa__write(&held->claims, 0);
    nsa__run_slots(&ordered, team, team->scratch);
    for (int i = 0; i < ordered.tasks; i++)
        if (ordered.progress[i] != INT32_MAX)
            CHECK(0, "task %d of %d is not done", i, (int)ordered.tasks);
    nsa__run(team, (int64_t)jobs->heads * (jobs->tile_end - jobs->tile_begin),
             nsa__key_gradient_task, jobs);
}

static __attribute__((unused)) void test_stalled(int threads, int task) {
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__team team;
    problem p, alone;
    problem_make(&p);
    problem_make(&alone);
    check_case("a thread that stalls in task %d of %d threads", task, threads);
    nsa_status s = run_all(&p, 1);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    for (int i = 0; i < 3; i++) memset(p.given[i], 0, sizes[i] * sizeof(float));
    p.d.threads = threads;
    nsa__attend_plan plan = nsa__backward_plan(&p.ddense, &p.dense, &p.d, NSA__DENSE, &p.d);
    size_t bytes = nsa__attend_plan_bytes(&plan, threads);
    void *workspace = malloc(bytes);
    nsa__arena shared = nsa__arena_at(workspace);
    nsa_status planned = nsa__team_make(&team, &p.d, workspace, bytes, plan.shared, plan.scratch);
    CHECK(planned == NSA_OK && team.threads == threads, "%s", nsa_status_name(planned));
    nsa__backward_layout(jobs, &plan, &shared);
    memset(&stalled, 0, sizeof stalled);
    stalled.task = task;
    nsa__each_heads(jobs, &team, 0, stalled_backward);
    CHECK(!stalled.held, "the stalled task has run by itself");
    CHECK(stalled.done > 0, "nothing was done meanwhile");
    s = run_all(&alone, 1);
    for (int i = 0; i < 3; i++) memset(alone.given[i], 0, sizes[i] * sizeof(float));
    size_t room = nsa_attend_dense_backward_workspace_size(&alone.d);
    void *other = malloc(room);
    s = nsa_attend_dense_backward(&alone.ddense, &alone.dense, &alone.d, other, room);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    for (int i = 0; i < 3; i++)
        CHECK_BITS("gradient", p.given[i], alone.given[i], sizes[i] * sizeof(float), sizeof(float));
    free(other);
    free(workspace);
    problem_free(&p);
    problem_free(&alone);
}

#ifdef _OPENMP
/* Workspaces are sized while OpenMP offers one thread, and used while it offers many. */
static void test_sized_for_one(void) {
    problem p;
    problem_make(&p);
    check_case("sized for one thread");
    nsa_status s = run_all(&p, 1);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    for (int i = 0; i < 4; i++) memset(p.given[i], 0, sizes[i] * sizeof(float));
    const int offered = omp_get_max_threads();
    p.d.threads = 0;
    omp_set_num_threads(1);
    size_t bytes = nsa_attention_backward_workspace_size(&p.dx, &p.x, &p.d), most,
           of_slc = nsa_attend_slc_backward_workspace_size(&p.d);
    omp_set_num_threads(200);
    most = nsa_attention_backward_workspace_size(&p.dx, &p.x, &p.d);
    CHECK(of_slc < nsa_attend_slc_backward_workspace_size(&p.d), "%zu bytes for slc", of_slc);
    CHECK(bytes < most, "%zu and %zu bytes", bytes, most);
    void *workspace = malloc(bytes);
    s = nsa_attention_backward(&p.dx, &p.x, &p.d, workspace, bytes);
    CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
    nsa_status less = nsa_attention_backward(&p.dx, &p.x, &p.d, workspace, bytes - 64);
    CHECK(nsa_status_kind(less) == NSA_ERROR_WORKSPACE, "%s", nsa_status_name(less));
    nsa_attend slc = {0}, dslc = {0};
    slc.q = p.x.q, slc.k = p.x.k_slc, slc.v = p.x.v_slc, slc.blocks = p.x.blocks;
    slc.out = p.x.out_slc, slc.lse = p.x.lse_slc, dslc.out = p.dx.out;
    less = nsa_attend_slc_backward(&dslc, &slc, &p.d, workspace, of_slc);
    CHECK(less == NSA_OK, "%s %s", nsa_status_name(less), nsa_status_where(less));
    omp_set_num_threads(offered);
    free(workspace);
    bytes = most_bytes(&p);
    workspace = malloc(bytes);
    s = nsa_attend_dense_forward(&p.dense, &p.d, workspace, bytes);
    if (s == NSA_OK) s = nsa_attend_dense_backward(&p.ddense, &p.dense, &p.d, workspace, bytes);
    compare(&p, s);
    free(workspace);
    problem_free(&p);
}

/* Each of a region's threads calls, with and without threads of its own. */
static void test_nested(int levels) {
    static caller callers[CALLERS];
    check_case("inside a region, %d active levels", levels);
    omp_set_max_active_levels(levels);
    for (int i = 0; i < CALLERS; i++) problem_make(&callers[i].p), callers[i].threads = 4;
#pragma omp parallel for num_threads(CALLERS) schedule(static, 1)
    for (int i = 0; i < CALLERS; i++) call(&callers[i]);
    for (int i = 0; i < CALLERS; i++) {
        compare(&callers[i].p, callers[i].status);
        problem_free(&callers[i].p);
    }
    omp_set_max_active_levels(1);
}
#endif

/* ---- Tasks grow with their own sequence: backward's bits depend on where tasks end ---- */

/* Queries of a task of each sequence, by what backward would set. */
static void task_queries(const nsa_desc *d, int queries[]) {
    nsa__attend_plan p = nsa__backward_plan(NULL, NULL, d, NSA__SLC, d);
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq)) {
        nsa__head_job job = nsa__job_make(&p);
        nsa__set_head(&job, &seq, 0, 1);
        queries[seq.nth] = job.task_queries;
    }
}

static void test_tasks(void) {
    static const int32_t begins[] = {0, 65536, 65536 + 8192, 65536 + 8192 + 20000};
    nsa_desc d = nsa_desc_default(3, 65536, 16, 1, 64);
    int packed[3], alone;
    d.begins = begins;
    task_queries(&d, packed);
    for (int b = 0; b < 3; b++) {
        nsa_desc one = nsa_desc_default(1, begins[b + 1] - begins[b], 16, 1, 64);
        task_queries(&one, &alone);
        check_case("slc, a packed sequence of %d tokens", one.tokens);
        CHECK(packed[b] == alone, "%d queries a task, alone %d", packed[b], alone);
    }
    CHECK(packed[0] > packed[1], "a long sequence has tasks of %d queries, a short one of %d",
          packed[0], packed[1]);
}

int main(void) {
    problem_make(&want);
    nsa_status s = run_all(&want, 1);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    double size = 0;
    for (size_t i = 0; i < Q; i++) size += fabs((double)want.given[0][i]);
    CHECK(size > 1, "there are gradients to compare");
    test_numbers_of_threads("plain");
    test_heads_at_once();
    test_less_room();
    test_callers(1);
    test_callers(4);
    test_pool();
    test_tasks();
#ifdef _OPENMP /* without it a call has one thread, and its counters need not be atomic */
    test_stalled(2, 0);
    test_stalled(2, 3);
    test_stalled(3, 5);
#endif
#ifdef _OPENMP
    test_sized_for_one();
    omp_set_dynamic(1);
    test_numbers_of_threads("OMP_DYNAMIC");
    omp_set_dynamic(0);
    test_nested(1);
    test_nested(2);
#endif
    problem_free(&want);
    return check_done("test_threads");
}
