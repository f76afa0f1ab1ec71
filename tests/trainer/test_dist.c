/* test_dist.c - several processes, each with a slice of the batch, against one with all of it:
   loss, gradients, parameters after some steps, bits from run to run, what is sent and when,
   moments collected and given back, a process that disagrees. Run by a launcher of MPI; with
   TEST_NCCL it starts itself, as torchrun would. A failure of any rank is a failure of all. Twin:
   dist.c. What whole programs do is test_mpi.c's. */
#include <stdlib.h>
#include <sys/wait.h>
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

/* What a run comes to. */
typedef struct result {
    double loss, norm;
    real *grad, *value; /* of the first step, its sums; after the last one */
    real *m;            /* all moments, on rank 0 */
    int64_t elements;
    int buckets;
} result;

static void release(result *r) {
    free(r->grad);
    free(r->value);
    free(r->m);
}

/* One step: micro-batches of which this process has its rows. */
static void step(model *m, dist *d, int64_t number, double *loss, double *norm) {
    adamw a = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = number};
    int rows = ROWS / d->world, first = d->rank * rows;
    model_zero_state(m);
    model_zero_gradients(m);
    for (int k = 0; k < BATCHES; k++) {
        int64_t at = (int64_t)(k * ROWS + first) * TOKENS;
        model_batch b = {tokens + at, labels + at, rows, TOKENS, NULL, 0, 0};
        m->last_of_step = k == BATCHES - 1;
        passing = true;
        CHECK(model_train(m, &b, 1.0 / (ROWS * TOKENS * BATCHES), &why), "%s", why.text);
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

static result run_with(dist *d, const model_config *c, const ops *o, bool muon) {
    result r = {0};
    model m;
    model_options options = {
        .batch = ROWS / d->world, .tokens = TOKENS, .training = true, .muon = muon, .dist = d};
    double norm, loss;
    if (!CHECK(model_open(&m, c, &options, o, 1, &why), "%s", why.text)) return r;
    CHECK(dist_attach(d, o, m.params.value, m.params.grad, m.params.elements, &why), "%s",
          why.text);
    for (int k = 1; k <= STEPS; k++) {
        step(&m, d, k, k == 1 ? &r.loss : &loss, k == 1 ? &r.norm : &norm);
        if (k == 1) keep_gradients(&m, d, &r);
    }
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
    return run_with(d, c, o, false);
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
    CHECK(fabs(x->norm - one->norm) <= gradients * one->norm, "norm %.9g, of one process %.9g",
          x->norm, one->norm);
    CHECK(dist_attach(&world, &plain, NULL, NULL, x->elements, &why), "%s", why.text);
    double g = distance(&world, x->grad, one->grad, one->elements);
    dist_detach(&world);
    double v = distance(NULL, x->value, one->value, one->elements);
    CHECK(g <= gradients, "gradients differ by %.3g", g);
    CHECK(v <= parameters, "parameters differ by %.3g after %d steps", v, STEPS);
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
    model_config c = geometry(false);
    dist alone = dist_alone();
    check_case("Muon, %d processes", world.world);
    result one = run_with(&alone, &c, &plain, true), many = run_with(&world, &c, &plain, true);
    compare(&many, &one, 1e-5, 1e-5);
    result again = run_with(&world, &c, &plain, true);
    same_bits("run to run, Muon", &again, &many);
    release(&one), release(&many), release(&again);
}

/* ---- A device that goes on, and one that does not ------------------------------------------- */

enum { BUSY = 3000 };
static int looks; /* at a step that never ends */

/* The device is busy for a while; then it waits for rank 2, as this process does. */
static link_progress never(dist_link *l, int lane, fault *f) {
    (void)l, (void)f;
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
    test_agreement();
    test_catching_up();
    test_disagreement();
    ops_cpu_close(&plain);
    int failures = check_done("test_dist");
    dist_close(&world);
    return failures;
}
