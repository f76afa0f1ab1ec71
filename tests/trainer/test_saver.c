/* test_saver.c - checkpoints beside the steps: what is written is what was there when it was
   asked for, the caller does not wait for it, and a failure is heard of. Twin: saver.c. */
#include <semaphore.h>

#include "checkpoint/saver.h"
#include "trainer_test.h"

enum { WEIGHTS = 50000 };

static fault why;
static config settings;
static float weights[WEIGHTS], moments[2][WEIGHTS];
static const safetensors_tensor model_list[] = {
    {"w", SAFETENSORS_F32, 2, {5, WEIGHTS / 5}, weights}};
static const safetensors_tensor moment_list[] = {
    {"m.w", SAFETENSORS_F32, 1, {WEIGHTS}, moments[0]},
    {"v.w", SAFETENSORS_F32, 1, {WEIGHTS}, moments[1]}};
static const checkpoint_part parts[] = {{"model", model_list, 1}, {"optimizer", moment_list, 2}};

static sem_t may_end;
static int64_t done_step;

static void copy(const void *user, void *to, const void *from, size_t bytes) {
    (void)user;
    memcpy(to, from, bytes);
}

/* Holds the thread until the test lets it go. */
static void done(const void *user, int64_t step) {
    (void)user;
    sem_wait(&may_end);
    done_step = step;
}

static int limit_s; /* how long a wait lasts */

static saver *open_saver(const char *out_dir) {
    static char folder[1024];
    snprintf(folder, sizeof folder, "%s", out_dir);
    saver_options o = {.out_dir = folder,
                       .config = &settings,
                       .parts = parts,
                       .count = 2,
                       .keep = 2,
                       .limit_s = limit_s,
                       .copy = copy,
                       .done = done};
    saver *s = saver_open(&o, &why);
    CHECK(s != NULL, "%s", why.text);
    return s;
}

static void set_values(int64_t step) {
    for (int i = 0; i < WEIGHTS; i++) {
        weights[i] = (float)step + (float)i / WEIGHTS;
        moments[0][i] = -weights[i];
        moments[1][i] = 2 * weights[i];
    }
}

static bool write_step(saver *s, int64_t step) {
    checkpoint_state state = {.step = step, .loss_scale = 1};
    set_values(step);
    bool ok = saver_write(s, &state, &why);
    set_values(-step); /* the step after */
    return ok;
}

static void expect_saved(const char *out_dir, int64_t step) {
    checkpoint k;
    if (!CHECK(checkpoint_open(&k, out_dir, &why), "%s", why.text)) return;
    CHECK(k.state.step == step, "step %d, must be %d", (int)k.state.step, (int)step);
    CHECK(checkpoint_load(&k, &parts[0], &why) && checkpoint_load(&k, &parts[1], &why), "%s",
          why.text);
    int wrong = 0;
    for (int i = 0; i < WEIGHTS; i++) {
        float want = (float)step + (float)i / WEIGHTS;
        wrong += weights[i] != want || moments[0][i] != -want || moments[1][i] != 2 * want;
    }
    CHECK(!wrong, "step %d: %d values are not those of the step", (int)step, wrong);
    checkpoint_close(&k);
}

static void test_copies(void) {
    saver *s = open_saver(test_path("run"));
    if (!s) return;
    check_case("beside the steps");
    for (int64_t step = 1; step <= 5; step++) {
        CHECK(write_step(s, step), "%s", why.text);
        CHECK(done_step < step, "step %d: the caller waited for it", (int)step);
        sem_post(&may_end);
        CHECK(saver_wait(s, &why), "%s", why.text);
        CHECK(done_step == step, "step %d is not done", (int)step);
        expect_saved(test_path("run"), step);
    }
    check_case("one after the other, without waiting between them");
    for (int64_t step = 6; step <= 12; step++) {
        sem_post(&may_end);
        CHECK(write_step(s, step), "%s", why.text);
    }
    saver_close(s);
    expect_saved(test_path("run"), 12);
}

static void test_failure(void) {
    saver *s;
    check_case("a folder that cannot be made");
    test_write_text(test_path("file"), "");
    s = open_saver(test_path("file"));
    if (!s) return;
    CHECK(saver_check(s, &why), "nothing has failed yet");
    CHECK(write_step(s, 1), "the step after it hears of it, not this one");
    TEST_FAULT(saver_wait(s, &why), &why, "file/checkpoints");
    TEST_FAULT(saver_check(s, &why), &why, "file/checkpoints");
    TEST_FAULT(write_step(s, 2), &why, "file/checkpoints");
    saver_close(s);
    CHECK(saver_check(NULL, &why) && saver_wait(NULL, &why), "none is fine");
    saver_close(NULL);
}

/* A disk that answers no more: the wait ends, nothing else is written beside the thread, and the
   run can end. */
static void test_stuck(void) {
    static saver *s; /* its memory stays */
    check_case("a disk that answers no more");
    limit_s = 1;
    s = open_saver(test_path("stuck"));
    limit_s = 0;
    if (!s || !CHECK(write_step(s, 1), "%s", why.text)) return;
    CHECK(!saver_is_stuck(s), "nobody has waited yet");
    TEST_FAULT(saver_wait(s, &why), &why, "the checkpoint of step 1 is not written after 1 s");
    CHECK(saver_is_stuck(s), "the thread still writes");
    TEST_FAULT(saver_wait(s, &why), &why, "is not written");
    TEST_FAULT(write_step(s, 2), &why, "is not written");
    saver_close(s);
    sem_post(&may_end);
    CHECK(!saver_is_stuck(NULL), "none is not");
}

int main(void) {
    test_begin();
    char *argv[] = {"test", "--dataset=synthetic"};
    config_program options = {.name = "test", .summary = ""};
    listener notes = test_notes();
    CHECK(config_load(&settings, &options, 2, argv, &notes, &why) == OPTION_OK, "%s", why.text);
    sem_init(&may_end, 0, 0);
    test_copies();
    test_failure();
    test_stuck();
    return test_end("test_saver");
}
