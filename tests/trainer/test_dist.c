/* test_dist.c - several processes, each with a slice of the batch or of its sequences, against one
   with all of it: loss, gradients, parameters after some steps, bits from run to run, what is sent
   and when, moments collected and given back, a process that disagrees. Run by a launcher of MPI;
   with TEST_NCCL it starts itself, as torchrun would. A failure of any rank is a failure of all.
   Twin: dist.c. What whole programs do is test_mpi.c's. */
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef TEST_NCCL
#include "dist/dist_nccl.h"
#include "free_port.h"
#else
#include "dist/dist_mpi.h"
#endif
#include "base/threads.h"
#include "model/optimizer.h"
#include "model_test.h"
#include "train/train_inside.h"

/* Buckets are small, so that there are more of them than lanes. */
enum { ROWS = 4, TOKENS = 60, VOCAB = 64, STEPS = 5, BATCHES = 2, BUCKET = 1 << 16 };

static int32_t tokens[ROWS * TOKENS * BATCHES], labels[ROWS * TOKENS * BATCHES];
static dist world;
static ops plain; /* the CPU's */

static model_config geometry(bool tied) {
    model_config c = tinylm(VOCAB, 64, 3, 4, 2, 16, 16, 8, 4, 16, 4, 24);
    c.tied = tied;
    return c;
}

/* Buckets that were sent, and those of them while backward had more to do. */
static int sent, sent_early;
static bool passing;
static void (*link_send)(dist_link *l, int lane, const link_bucket *b);
static void (*last_of_backward)(const ops *o, real *dtable, const void *dx, const int32_t *ids,
                                int64_t rows, int dim);

static void count_and_send(dist_link *l, int lane, const link_bucket *b) {
    sent++;
    sent_early += passing;
    link_send(l, lane, b);
}

static void pass_and_stop(const ops *o, real *dtable, const void *dx, const int32_t *ids,
                          int64_t rows, int dim) {
    last_of_backward(o, dtable, dx, ids, rows, dim);
    passing = false;
}

/* How a model is trained. */
typedef struct variant {
    const char *name;
    model_config shape;
    int tokens, steps;
    checkpointing how;
    bool muon, documents;
} variant;

static variant plainly(model_config c) {
    variant v = {.shape = c, .tokens = TOKENS, .steps = STEPS};
    return v;
}

/* What a run comes to. */
typedef struct result {
    double loss, norm, seen; /* seen: in an evaluation after the last step */
    real *grad, *value;      /* of the first step, its sums; after the last one */
    real *m;                 /* all moments, on rank 0 */
    int64_t elements;
    int buckets;
} result;

static void release(result *r) {
    free(r->grad);
    free(r->value);
    free(r->m);
}

/* Rows with documents that begin at a border of chunks, before it, behind it; that are shorter than
   a compression block; that are longer than any chunk. */
static void add_documents(model_batch *b, int first) {
    enum { MOST = 6 };
    static const int starts[ROWS][MOST] = {{0, 13, 15, 28}, {0}, {0, 3, 7, 42, 43, 49}, {0, 29}};
    static int32_t begins[ROWS * MOST + 1];
    int count = 0;
    for (int r = 0; r < b->batch; r++)
        for (int i = 0; i < MOST && (i == 0 || starts[first + r][i]); i++)
            begins[count++] = r * b->tokens_each + starts[first + r][i];
    begins[count] = b->batch * b->tokens_each;
    for (int i = 0; i < count; i++)
        if (begins[i + 1] - begins[i] > b->longest) b->longest = begins[i + 1] - begins[i];
    b->begins = begins;
    b->documents = count;
}

static model_batch batch_of(const variant *v, const dist *d, int k) {
    int rows = ROWS / dist_groups(d), first = dist_group(d) * rows;
    int64_t at = (int64_t)(k * ROWS + first) * v->tokens;
    model_batch b = {tokens + at, labels + at, rows, v->tokens, NULL, 0, 0};
    if (v->documents) add_documents(&b, first);
    return b;
}

/* One step: micro-batches of which this process has its rows. */
static void step(model *m, dist *d, const variant *v, int64_t number, double *loss, double *norm) {
    adamw a = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = number};
    model_zero_state(m);
    model_zero_gradients(m);
    for (int k = 0; k < BATCHES; k++) {
        model_batch b = batch_of(v, d, k);
        m->last_of_step = k == BATCHES - 1;
        passing = true;
        CHECK(model_train(m, &b, 1.0 / (ROWS * v->tokens * BATCHES), &why), "%s", why.text);
    }
    CHECK(optimizer_step(m, &a, 1, &why), "%s", why.text);
    dist_post(d);
    CHECK(dist_catch_up(d, &why), "%s", why.text);
    step_state s = model_state(m);
    *loss = s.loss / (double)s.labels;
    *norm = s.grad_norm;
}

static void keep_gradients(const model *m, const dist *d, result *r) {
    r->elements = m->params.elements;
    r->grad = check_alloc((size_t)r->elements * sizeof *r->grad);
    memset(r->grad, 0, (size_t)r->elements * sizeof *r->grad);
    for (int i = 0; i < dist_pieces(d); i++) {
        dist_piece p = dist_piece_at(d, i);
        memcpy(r->grad + p.first, m->params.grad + p.first, (size_t)p.count * sizeof *r->grad);
    }
}

static double evaluation(model *m, dist *d, const variant *v) {
    model_batch b = batch_of(v, d, 0);
    model_zero_state(m);
    CHECK(model_evaluate(m, &b, &why), "%s", why.text);
    double loss = model_state(m).loss;
    CHECK(dist_sum(d, &loss, 1, &why), "%s", why.text);
    return loss;
}

static result run_with(dist *d, const variant *v, const ops *o) {
    result r = {0};
    model m;
    model_options options = {.batch = ROWS / dist_groups(d),
                             .tokens = v->tokens,
                             .training = true,
                             .checkpointing = v->how,
                             .muon = v->muon,
                             .dist = d};
    double norm, loss;
    if (!CHECK(model_open(&m, &v->shape, &options, o, 1, &why), "%s", why.text)) return r;
    CHECK(dist_attach(d, o, m.params.value, m.params.grad, m.params.elements, &why), "%s",
          why.text);
    for (int k = 1; k <= v->steps; k++) {
        step(&m, d, v, k, k == 1 ? &r.loss : &loss, k == 1 ? &r.norm : &norm);
        if (k == 1) keep_gradients(&m, d, &r);
    }
    r.seen = evaluation(&m, d, v);
    size_t bytes = (size_t)r.elements * sizeof *r.value;
    r.buckets = d->buckets;
    r.value = check_alloc(bytes);
    memcpy(r.value, m.params.value, bytes);
    r.m = check_alloc(bytes);
    memset(r.m, 0, bytes);
    CHECK(dist_collect(d, m.params.m, r.m, &why), "%s", why.text);
    model_close(&m);
    dist_detach(d);
    return r;
}

static result run(dist *d, const model_config *c, const ops *o) {
    variant v = plainly(*c);
    return run_with(d, &v, o);
}

/* |a - b| / |b| over this process's own pieces, or over all. */
static double distance(const dist *d, const real *a, const real *b, int64_t elements) {
    double difference = 0, size = 0;
    int count = d ? dist_pieces(d) : 1;
    for (int i = 0; i < count; i++) {
        dist_piece p = {0, elements, 0};
        if (d) p = dist_piece_at(d, i);
        for (int64_t e = p.first; e < p.first + p.count && e < elements; e++) {
            difference += ((double)a[e] - (double)b[e]) * ((double)a[e] - (double)b[e]);
            size += (double)b[e] * (double)b[e];
        }
    }
    return sqrt(difference / size);
}

/* The bound of the parameters: Adam divides a gradient by its own size, so a parameter whose
   gradient is nearly zero may move by lr to the other side in each step. Few do. */
static void compare(const result *x, const result *one, double gradients, double parameters) {
    CHECK(fabs(x->loss - one->loss) <= 1e-5 * one->loss, "loss %.9g, of one process %.9g", x->loss,
          one->loss);
    CHECK(fabs(x->seen - one->seen) <= parameters * one->seen,
          "evaluation %.9g, of one process %.9g", x->seen, one->seen);
    CHECK(fabs(x->norm - one->norm) <= gradients * one->norm, "norm %.9g, of one process %.9g",
          x->norm, one->norm);
    CHECK(dist_attach(&world, &plain, NULL, NULL, x->elements, &why), "%s", why.text);
    double g = distance(&world, x->grad, one->grad, one->elements);
    dist_detach(&world);
    double v = distance(NULL, x->value, one->value, one->elements);
    CHECK(g <= gradients, "gradients differ by %.3g", g);
    CHECK(v <= parameters, "parameters differ by %.3g", v);
    if (world.rank == 0) {
        double m = distance(NULL, x->m, one->m, one->elements);
        CHECK(m <= 10 * gradients, "moments differ by %.3g", m);
        printf("  gradients %.2g, parameters %.2g, moments %.2g, %d buckets\n", g, v, m,
               x->buckets);
    }
}

static void same_bits(const char *what, const result *a, const result *b) {
    check_case("%s", what);
    size_t bytes = (size_t)a->elements * sizeof *a->value;
    CHECK_BITS(what, a->value, b->value, bytes, sizeof *a->value);
    CHECK(a->loss == b->loss && a->norm == b->norm, "loss %.17g and %.17g, norm %.17g and %.17g",
          a->loss, b->loss, a->norm, b->norm);
}

/* The last micro-batch of a step alone is sent, and all but one bucket of it before its backward
   pass is over. */
static void check_sent(const result *r) {
    CHECK(sent == STEPS * r->buckets, "%d buckets sent in %d steps of %d", sent, STEPS, r->buckets);
    CHECK(sent_early == STEPS * (r->buckets - 1), "%d of %d buckets sent during backward",
          sent_early, sent);
}

static void test_steps(void) {
    const ops *o = &plain;
    for (int tied = 0; tied < 2; tied++) {
        model_config c = geometry(tied);
        dist alone = dist_alone();
        ops away = *o;
        check_case("%d processes%s", world.world, tied ? ", tied" : "");
        sent = sent_early = 0;
        result one = run(&alone, &c, o), many = run(&world, &c, o);
        check_sent(&many);
        CHECK(many.buckets > LINK_LANES, "%d buckets", many.buckets);
        compare(&many, &one, 1e-5, 1e-5);
        result again = run(&world, &c, o);
        same_bits("run to run", &again, &many);
        away.host_memory = false; /* as if each value had to be fetched */
        result staged = run(&world, &c, &away);
        same_bits("by way of the host", &staged, &many);
        check_case("timed");
        world.timed = true;
        result timed = run(&world, &c, o);
        same_bits("each bucket waited for", &timed, &many);
        world.timed = false;
        check_case("bf16");
        world.compress = !world.link->needs_device;
        result half = run(&world, &c, o);
        compare(&half, &one, 4e-3, 4e-3);
        world.compress = false;
        CHECK(world.link->needs_device || memcmp(half.value, many.value, 1000),
              "bf16 changes nothing");
        result *all[] = {&one, &many, &again, &staged, &timed, &half};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) release(all[i]);
    }
}

/* Directions are gathered, and each process orthogonalises all of them. Where a singular value of
   one is near 0, five steps multiply what differs by 3.4445^5 = 485: of 3e-7 that is 1.5e-4 of an
   update, and an update is a hundredth of the parameters. */
static void test_muon(void) {
    variant v = plainly(geometry(false));
    dist alone = dist_alone();
    v.muon = true;
    check_case("Muon, %d processes", world.world);
    result one = run_with(&alone, &v, &plain), many = run_with(&world, &v, &plain);
    compare(&many, &one, 1e-5, 1e-5);
    result again = run_with(&world, &v, &plain);
    same_bits("run to run, Muon", &again, &many);
    release(&one), release(&many), release(&again);
}

/* ---- Divided sequences ---------------------------------------------------------------------- */

/* Blocks whose numbers say where they come from. */
static void test_blocks(int context) {
    enum { EACH = 1000 };
    real *x = check_alloc((size_t)(context * EACH) * sizeof *x);
    int first = world.rank / context * context;
    bool gathered = true, reduced = true;
    CHECK(dist_attach(&world, &plain, NULL, NULL, dist_multiple(&world), &why), "%s", why.text);
    CHECK(dist_attach_blocks(&world, &plain, EACH, &why), "%s", why.text);
    for (int i = 0; i < EACH; i++) x[world.part * EACH + i] = (real)(world.rank * EACH + i);
    dist_gather_blocks(&world, x, EACH);
    dist_post(&world);
    CHECK(dist_catch_up(&world, &why), "%s", why.text);
    for (int i = 0; i < context * EACH; i++)
        gathered = gathered && x[i] == (real)(first * EACH + i);
    CHECK(gathered, "gathered blocks of %d", context);
    for (int i = 0; i < context * EACH; i++) x[i] = (real)(i + world.rank - first);
    dist_reduce_blocks(&world, x, EACH);
    dist_post(&world);
    CHECK(dist_catch_up(&world, &why), "%s", why.text);
    const real *own = x + world.part * EACH;
    for (int i = 0; i < EACH; i++)
        reduced = reduced &&
                  own[i] == (real)(context * (world.part * EACH + i) + context * (context - 1) / 2);
    CHECK(reduced, "reduced blocks of %d", context);
    dist_detach(&world);
    free(x);
}

static void add_variant(variant *all, int *count, const char *name, model_config c) {
    variant v = {.name = name, .shape = c, .tokens = 56, .steps = 2};
    all[(*count)++] = v;
}

/* Chunks of 7 or 14 tokens: compression blocks of 8 cross every border, selection blocks of 16 and
   windows of 24 several. */
static int variants(variant all[static 8]) {
    int count = 0;
    model_config c = geometry(false), kinds = geometry(true);
    static const unsigned char pattern[] = {ATTENTION_CMP_SLC, ATTENTION_FULL, ATTENTION_WINDOW};
    add_variant(all, &count, "nsa", c);
    add_variant(all, &count, "checkpointing", c);
    all[count - 1].how = CHECKPOINT_LAYERS;
    c.phi = NSA_PHI_MLP;
    c.qk_norm = true;
    add_variant(all, &count, "documents, mlp, selective checkpointing, qk norm", c);
    all[count - 1].how = CHECKPOINT_SELECTIVE;
    all[count - 1].documents = true;
    memcpy(kinds.attention, pattern, sizeof pattern);
    add_variant(all, &count, "cmp+slc, full, window", kinds);
    all[count - 1].muon = true;
    kinds.swiglu = true;
    add_variant(all, &count, "documents; cmp+slc, full, window, swiglu", kinds);
    all[count - 1].documents = true;
    c = geometry(false);
    c.shared_kv = c.gate_linear = true;
    c.phi = NSA_PHI_CONV;
    add_variant(all, &count, "shared k and v, linear gate, conv", c);
    return count;
}

static void test_context(int context) {
    variant all[8];
    int count = variants(all);
    dist alone = dist_alone();
    check_case("sequences of %d over %d", world.world, context);
    CHECK(dist_divide(&world, context, &why), "%s", why.text);
    test_blocks(context);
    for (int i = 0; i < count; i++) {
        check_case("%s: %d processes, sequences over %d", all[i].name, world.world, context);
        result one = run_with(&alone, &all[i], &plain), many = run_with(&world, &all[i], &plain);
        compare(&many, &one, 1e-5, 1e-5);
        result again = run_with(&world, &all[i], &plain);
        same_bits("run to run", &again, &many);
        release(&one), release(&many), release(&again);
    }
    ops away = plain;
    away.host_memory = false;
    result many = run_with(&world, &all[0], &plain), staged = run_with(&world, &all[0], &away);
    same_bits("by way of the host", &staged, &many);
    release(&many), release(&staged);
    CHECK(dist_divide(&world, 1, &why), "%s", why.text);
}

/* bf16: K and V travel as they are, their gradients in f32. The bound is of roundings that another
   order of sums makes others. */
static void test_narrow(int context) {
    variant all[8];
    (void)variants(all);
    dist alone = dist_alone();
    ops half = open_ops(1);
    ops_cpu_narrow(&half, NSA_BF16);
    half.stream = &plain;
    half.host_memory = plain.host_memory;
    check_case("bf16, sequences over %d", context);
    CHECK(dist_divide(&world, context, &why), "%s", why.text);
    result one = run_with(&alone, &all[2], &half), many = run_with(&world, &all[2], &half);
    compare(&many, &one, 1e-2, 1e-2);
    release(&one), release(&many);
    CHECK(dist_divide(&world, 1, &why), "%s", why.text);
    ops_cpu_close(&half);
}

/* A sample is not divided, and as long as a share; rows that cannot be divided are refused. */
static void test_shares(int context) {
    variant v = plainly(geometry(false));
    model_options options = {.batch = 1, .tokens = 56, .dist = &world};
    real logits[2][VOCAB];
    model m;
    dist alone = dist_alone();
    check_case("shares of %d", context);
    for (int divided = 0; divided < 2; divided++) {
        CHECK(dist_divide(&world, divided ? context : 1, &why), "%s", why.text);
        options.dist = divided ? &world : &alone;
        if (!CHECK(model_open(&m, &v.shape, &options, &plain, 1, &why), "%s", why.text)) return;
        int longest = model_longest(&m);
        CHECK(longest == 56 / (divided ? context : 1), "longest %d", longest);
        CHECK(model_next(&m, tokens, 56 / context, logits[divided], &why), "%s", why.text);
        CHECK(!model_next(&m, tokens, longest + 1, logits[0], &why), "a row too long");
        model_batch odd = {tokens, labels, 1, 4 * context - 1, NULL, 0, 0};
        CHECK(model_evaluate(&m, &odd, &why) == !divided, "a row of %d tokens", odd.tokens_each);
        CHECK(!divided || strstr(why.text, "a multiple of"), "\"%s\"", why.text);
        model_close(&m);
        dist_detach(options.dist);
    }
    CHECK_BITS("sample", logits[0], logits[1], sizeof logits[0], sizeof(real));
    options.tokens = 57;
    CHECK(!model_open(&m, &v.shape, &options, &plain, 1, &why), "57 tokens");
    CHECK(strstr(why.text, "a multiple of"), "\"%s\"", why.text);
    CHECK(dist_divide(&world, 1, &why), "%s", why.text);
}

/* ---- A device that goes on, and one that does not ------------------------------------------- */

enum { BUSY = 50 };
static int looks; /* at a step that never ends */

/* The device is busy for a while; then it waits for rank 2, as this process does. A look takes a
   millisecond or more, as on a machine that has much else to do. */
static link_progress never(dist_link *l, int lane, fault *f) {
    struct timespec nap = {0, 1100000};
    (void)l, (void)f;
    nanosleep(&nap, NULL);
    if (lane == LINK_STEP && ++looks <= BUSY) phase_set(PHASE_BWD, looks);
    return LINK_WAITING;
}

static bool lacks_rank_2(const dist_link *l, int lane, int rank) {
    (void)l, (void)lane;
    return rank == 2;
}

static void no_words(dist_link *l, const char *words) {
    (void)l, (void)words;
}

static void no_launch(dist_link *l, const ops *o) {
    (void)l, (void)o;
}

static void test_catching_up(void) {
    dist_link l = {.name = "none", .world = 3, .join = no_launch, .post = no_launch};
    dist d;
    l.test = never;
    l.is_missing = lacks_rank_2;
    l.tell = no_words;
    check_case("a step that never ends");
    CHECK(dist_open(&d, &l, &why), "%s", why.text);
    CHECK(dist_on_stream(&d) && dist_catch_up(&d, &why), "nothing was posted");
    d.timeout = 1e-3; /* less than the device is busy for */
    dist_post(&d);
    CHECK(!dist_catch_up(&d, &why) && strstr(why.text, "rank 2: no answer"), "\"%s\"", why.text);
    CHECK(looks > BUSY, "given up after %d looks, while the device went on", looks);
    CHECK(looks < BUSY + 10, "given up after %d looks, though it had stood still for long", looks);
    CHECK(!dist_catch_up(&d, &why) && strstr(why.text, "rank 2"), "it stays ended");
    d.timed = true;
    CHECK(!dist_on_stream(&d), "the host waits for what it times");
    free(d.shared);
}

/* Each process picks its own pieces of what rank 0 collects. */
static void test_moments(void) {
    enum { COUNT = 5000 };
    int64_t multiple = dist_multiple(&world), count = (COUNT + multiple - 1) / multiple * multiple;
    real *whole = check_alloc((size_t)count * sizeof *whole), *own = check_alloc((size_t)count * 8);
    real *back = check_alloc((size_t)count * sizeof *back);
    check_case("moments");
    world.bucket_bytes = 4096;
    for (int64_t i = 0; i < count; i++) whole[i] = (real)i;
    CHECK(dist_attach(&world, &plain, NULL, NULL, count, &why), "%s", why.text);
    dist_pick(&world, own, whole);
    dist_piece second = dist_piece_at(&world, 1);
    CHECK(own[second.own] == (real)second.first && second.first > 0, "a piece begins with %g",
          (double)own[second.own]);
    CHECK(dist_collect(&world, own, back, &why), "%s", why.text);
    if (world.rank == 0) CHECK_BITS("moments", back, whole, (size_t)count * sizeof *whole, 4);
    dist_detach(&world);
    world.bucket_bytes = BUCKET;
    free(whole);
    free(own);
    free(back);
}

/* One bit of one parameter of the last rank; there are more than are summed at once. */
static void test_disagreement(void) {
    model_config c = geometry(false);
    c.vocab = 20000;
    model_options options = {.batch = 1, .tokens = TOKENS, .training = true, .dist = &world};
    trainer t = {.o = &plain, .dist = &world, .state = {.step = 200}};
    char word[32];
    check_case("disagreement");
    if (!CHECK(model_open(&t.model, &c, &options, &plain, 1, &why), "%s", why.text)) return;
    CHECK(train_same_parameters(&t, &why), "%s", why.text);
    real *last = &t.model.params.value[t.model.params.elements / 2];
    unsigned char byte;
    memcpy(&byte, last, 1);
    if (world.rank == world.world - 1) byte ^= 1;
    memcpy(last, &byte, 1);
    CHECK(!train_same_parameters(&t, &why), "the processes have the same parameters");
    snprintf(word, sizeof word, "rank %d disagrees", world.world - 1);
    CHECK(strstr(why.text, word) && strstr(why.text, "step 200"), "\"%s\" lacks \"%s\"", why.text,
          word);
    model_close(&t.model);
}

static void test_agreement(void) {
    uint64_t sums[] = {5, 7, 9};
    double x[] = {world.rank + 1, 0.1};
    int64_t largest = world.rank == 1 ? 15 : 0;
    int rank, which, last = world.world - 1;
    check_case("agreement");
    CHECK(dist_same(&world, sums, 3, &rank, &which, &why) && rank == -1, "rank %d differs", rank);
    if (world.rank == last) sums[1]++;
    CHECK(dist_same(&world, sums, 3, &rank, &which, &why), "%s", why.text);
    CHECK(world.world == 1 || (rank == last && which == 1), "rank %d, checksum %d", rank, which);
    if (world.world > 2) { /* of two nobody knows who is right */
        sums[1] = world.rank == 0 ? 6 : 7;
        CHECK(dist_same(&world, sums, 3, &rank, &which, &why), "%s", why.text);
        CHECK(rank == 0 && which == 1, "rank %d, checksum %d", rank, which);
    }
    CHECK(dist_sum(&world, x, 2, &why), "%s", why.text);
    CHECK(x[0] == world.world * (world.world + 1) / 2, "the sum of the ranks is %g", x[0]);
    CHECK(dist_largest(&world, &largest, &rank, &why), "%s", why.text);
    CHECK(world.world == 1 || (largest == 15 && rank == 1), "largest %lld of rank %d",
          (long long)largest, rank);
    largest = world.rank ? 15 : 0;
    CHECK(dist_largest(&world, &largest, &rank, &why), "%s", why.text);
    CHECK(rank == 1, "the lowest of those that have the largest is %d", rank);
}

#ifdef TEST_NCCL

static void put(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* One process for each rank, as torchrun starts them. */
static int start_all(int count, char **argv) {
    int failures = 0, status;
    put("WORLD_SIZE", count);
    put("MASTER_PORT", free_port());
    for (int r = 0; r < count; r++) {
        put("RANK", r);
        put("LOCAL_RANK", r);
        if (fork()) continue;
        execv(argv[0], argv);
        _exit(99);
    }
    while (wait(&status) > 0) failures += !WIFEXITED(status) || WEXITSTATUS(status);
    return failures;
}

static dist_link *open_link(int argc, char **argv) {
    if (argc == 2 && !getenv("RANK")) exit(start_all(atoi(argv[1]), argv));
    return dist_nccl_open(&why);
}

#else

static dist_link *open_link(int argc, char **argv) {
    (void)argc, (void)argv;
    return dist_mpi_open();
}

#endif

int main(int argc, char **argv) {
    threads_wait_asleep(argv);
    dist_link *link = open_link(argc, argv);
    if (!link || link->world < 2) {
        fprintf(stderr, "usage: mpirun -n N %s; %s\n", argv[0], why.text);
        return 2;
    }
    plain = open_ops(1);
    plain.host_memory = !link->needs_device;
    plain.stream = &plain; /* the double of NCCL asks for none */
    last_of_backward = plain.embed_backward;
    plain.embed_backward = pass_and_stop;
    CHECK(dist_open(&world, link, &why), "%s", why.text);
    world.bucket_bytes = BUCKET;
    world.timeout = 60;
    link_send = link->reduce_start;
    link->reduce_start = count_and_send;
    random_tokens(tokens, labels, ROWS * BATCHES, TOKENS, VOCAB, 0);
    test_steps();
    test_muon();
    test_moments();
    for (int context = 2; context <= world.world; context *= 2) test_context(context);
    test_narrow(2);
    test_shares(2);
    test_agreement();
    test_catching_up();
    test_disagreement();
    ops_cpu_close(&plain);
    int failures = check_done("test_dist");
    dist_close(&world);
    return failures;
}
