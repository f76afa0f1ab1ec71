/* test_checkpoint.c - checkpoints: the same bits back, the newest found, old ones removed, damage
   refused by name, a full disk or a kill at any moment leaves a checkpoint that loads. */
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <xxhash.h>

#include "checkpoint/checkpoint.h"
#include "trainer_test.h"

enum { WEIGHTS = 3000 };

static fault why;
static config settings;
static double val_loss = NAN; /* of the steps that are saved */
static float weights[WEIGHTS], first[WEIGHTS], second[WEIGHTS];

/* The lists of a model with one tensor and its two moments. */
static const safetensors_tensor model_list[] = {
    {"w", SAFETENSORS_F32, 2, {3, WEIGHTS / 3}, weights}};
static const safetensors_tensor moment_list[] = {{"w.m", SAFETENSORS_F32, 1, {WEIGHTS}, first},
                                                 {"w.v", SAFETENSORS_F32, 1, {WEIGHTS}, second}};
static const checkpoint_part parts[] = {{"model", model_list, 1}, {"optimizer", moment_list, 2}};

/* Values that tell their step. */
static void set_values(int64_t step) {
    for (int i = 0; i < WEIGHTS; i++) {
        weights[i] = (float)step + (float)i / WEIGHTS;
        first[i] = -weights[i];
        second[i] = weights[i] * 2;
    }
}

static bool values_are_of(int64_t step) {
    float w[WEIGHTS], m[WEIGHTS], v[WEIGHTS];
    memcpy(w, weights, sizeof w);
    memcpy(m, first, sizeof m);
    memcpy(v, second, sizeof v);
    set_values(step);
    return !memcmp(w, weights, sizeof w) && !memcmp(m, first, sizeof m) &&
           !memcmp(v, second, sizeof v);
}

static checkpoint_state state_of(int64_t step) {
    checkpoint_state s = {.step = step,
                          .seed = UINT64_MAX - 5,
                          .data = {step * 8, 0xfedcba9876543210u, 1, 2, 3, 4, 5},
                          .loss_scale = 65536,
                          .scaler_good_steps = 17,
                          .skipped_steps = 2,
                          .loss_first = 5.545177444479562,
                          .val_loss = val_loss,
                          .seconds = 1.0 / 3,
                          .tokens = step * 1024};
    return s;
}

static bool save(const char *out_dir, int64_t step, int64_t keep) {
    checkpoint_state s = state_of(step);
    set_values(step);
    return checkpoint_write(out_dir, &settings, &s, parts, 2, keep, &why);
}

/* The step of the checkpoint that a path leads to, all of it verified; -1: the fault says why. */
static int64_t load(const char *path) {
    checkpoint k;
    memset(weights, 0, sizeof weights);
    memset(first, 0, sizeof first);
    memset(second, 0, sizeof second);
    if (!checkpoint_open(&k, path, &why)) return -1;
    bool ok = checkpoint_load(&k, &parts[0], &why) && checkpoint_load(&k, &parts[1], &why);
    checkpoint_state want = state_of(k.state.step);
    CHECK_BITS("state", &k.state, &want, sizeof want, 8);
    CHECK(k.config.train.seq_len == settings.train.seq_len &&
              k.config.model.dim == settings.model.dim,
          "settings");
    checkpoint_close(&k);
    if (!ok) return -1;
    CHECK(values_are_of(want.step), "values are not those of step %" PRId64, want.step);
    return want.step;
}

static void expect_step(const char *path, int64_t step) {
    int64_t got = load(path);
    CHECK(got == step, "step %" PRId64 ", must be %" PRId64 " (%s)", got, step, why.text);
}

static void refuse(const char *path, const char *words) {
    TEST_FAULT(load(path) >= 0, &why, words);
}

static bool exists(const char *name) {
    return !access(test_path(name), F_OK);
}

/* ---- Whole checkpoints ---- */

static void test_round_trip(void) {
    check_case("round trip");
    CHECK(save(test_path("a/run"), 200, 3), "save: %s", why.text);
    expect_step(test_path("a/run"), 200);
    expect_step(test_path("a/run/checkpoints"), 200);
    expect_step(test_path("a/run/checkpoints/step_00000200"), 200);
    expect_step(test_path("a/run/checkpoints/latest"), 200);
    check_case("a state that JSON cannot hold");
    checkpoint_state s = state_of(1);
    checkpoint k;
    s.loss_first = NAN;
    CHECK(checkpoint_write(test_path("nan"), &settings, &s, parts, 2, 3, &why), "%s", why.text);
    CHECK(checkpoint_open(&k, test_path("nan"), &why) && isnan(k.state.loss_first), "NaN stays");
    checkpoint_close(&k);
}

static void test_retention(void) {
    check_case("retention");
    for (int64_t step = 10; step <= 50; step += 10)
        CHECK(save(test_path("keep"), step, 2), "save: %s", why.text);
    CHECK(exists("keep/checkpoints/step_00000050") && exists("keep/checkpoints/step_00000040"),
          "the newest two are there");
    CHECK(!exists("keep/checkpoints/step_00000030") && !exists("keep/checkpoints/step_00000010"),
          "the others are not");
    /* A run resumed at 20 writes 30 beside a 40 and a 50 that it left behind: 30 is the newest. */
    CHECK(save(test_path("keep"), 30, 1), "save: %s", why.text);
    expect_step(test_path("keep"), 30);
    CHECK(exists("keep/checkpoints/step_00000050") && exists("keep/checkpoints/step_00000040"),
          "what is later is not of its past");
    CHECK(save(test_path("keep"), 50, 1), "again the same step: %s", why.text);
    expect_step(test_path("keep"), 50);
    CHECK(!exists("keep/checkpoints/step_00000050.old") &&
              !exists("keep/checkpoints/step_00000030") &&
              !exists("keep/checkpoints/step_00000040"),
          "one is left");
    check_case("retention, with a clock that was set back");
    struct timespec ahead[2] = {{4000000000, 0}, {4000000000, 0}};
    CHECK(save(test_path("clock"), 10, 0) && save(test_path("clock"), 20, 0), "%s", why.text);
    CHECK(!utimensat(AT_FDCWD, test_path("clock/checkpoints/step_00000010"), ahead, 0),
          "set the time");
    CHECK(save(test_path("clock"), 30, 2), "save: %s", why.text);
    expect_step(test_path("clock"), 30);
    CHECK(exists("clock/checkpoints/step_00000020") && !exists("clock/checkpoints/step_00000010"),
          "by step, not by time");
    check_case("keep all");
    for (int64_t step = 1; step <= 5; step++)
        CHECK(save(test_path("all"), step, 0), "%s", why.text);
    CHECK(exists("all/checkpoints/step_00000001"), "0 keeps all");
}

/* Multiples of train.keep_every stay, beside the newest. */
static void test_keep_every(void) {
    char name[64];
    check_case("keep every");
    settings.train.keep_every = 4;
    for (int64_t step = 1; step <= 11; step++)
        CHECK(save(test_path("every"), step, 2), "save: %s", why.text);
    settings.train.keep_every = 0;
    for (int step = 1; step <= 11; step++) {
        snprintf(name, sizeof name, "every/checkpoints/step_%08d", step);
        CHECK(exists(name) == (step % 4 == 0 || step >= 10), "step %d: %d", step, exists(name));
    }
    expect_step(test_path("every"), 11);
}

/* `latest` lost or wrong: the highest step that is complete. */
static void test_latest(void) {
    check_case("latest");
    unlink(test_path("all/checkpoints/latest"));
    expect_step(test_path("all"), 5);
    CHECK(!symlink("step_00000077", test_path("all/checkpoints/latest")), "link");
    expect_step(test_path("all"), 5);
    unlink(test_path("all/checkpoints/latest"));
    CHECK(!symlink("../../secret", test_path("all/checkpoints/latest")), "link");
    expect_step(test_path("all"), 5);
    CHECK(!rename(test_path("all/checkpoints/step_00000005"),
                  test_path("all/checkpoints/step_00000005.old")),
          "as a kill between two renames leaves it");
    expect_step(test_path("all"), 5);
    test_mkdir("all/checkpoints/step_00000009");
    expect_step(test_path("all"), 5);
    CHECK(save(test_path("all"), 6, 0), "%s", why.text);
    expect_step(test_path("all"), 6);
    refuse(test_path("nowhere"), "nowhere: no checkpoint");
    test_mkdir("empty");
    refuse(test_path("empty"), "empty: no checkpoint: must be a folder with a state.json");
    test_write_text(test_path("empty/config.json"), "{}");
    refuse(test_path("empty"), "under checkpoints/; of one of transformers `convert import`");
}

/* Half removed: its state is there, its tensors are not. Without `latest` it must not be taken. */
static void test_torn(void) {
    check_case("a torn checkpoint");
    CHECK(save(test_path("torn"), 1, 0) && save(test_path("torn"), 2, 0), "%s", why.text);
    unlink(test_path("torn/checkpoints/latest"));
    CHECK(!rename(test_path("torn/checkpoints/step_00000002"),
                  test_path("torn/checkpoints/step_00000002.old")),
          "rename");
    CHECK(!unlink(test_path("torn/checkpoints/step_00000002.old/model.safetensors")), "unlink");
    expect_step(test_path("torn"), 1);
    CHECK(save(test_path("torn"), 2, 0), "%s", why.text);
    unlink(test_path("torn/checkpoints/latest"));
    CHECK(!exists("torn/checkpoints/step_00000002.old"), "what was replaced is gone");
    expect_step(test_path("torn"), 2);
}

/* ---- Going on from one ---- */

static bool adopt(const char *from, const char *out_dir, const config *c) {
    checkpoint k;
    if (!checkpoint_open(&k, from, &why)) return false;
    bool ok = checkpoint_adopt(&k, out_dir, c, &why);
    checkpoint_close(&k);
    return ok;
}

static double lr_of(const char *path) {
    checkpoint k;
    if (!CHECK(checkpoint_open(&k, path, &why), "%s", why.text)) return -1;
    checkpoint_close(&k);
    return k.config.train.lr;
}

static void test_adopt(void) {
    listener notes = test_notes();
    config other = settings;
    other.train.lr = 0.125;
    check_case("going back");
    for (int64_t step = 10; step <= 60; step += 10)
        CHECK(save(test_path("back"), step, 0), "%s", why.text);
    CHECK(adopt(test_path("back/checkpoints/step_00000020"), test_path("back"), &settings), "%s",
          why.text);
    expect_step(test_path("back"), 20);
    CHECK(checkpoint_leave_later(test_path("back"), 20, &notes, &why), "%s", why.text);
    CHECK(strstr(test_said, "now step_00000060.left"), "what was set aside is said: %s", test_said);
    CHECK(exists("back/checkpoints/step_00000030.left") && exists("back/checkpoints/step_00000010"),
          "later ones are set aside, earlier ones stay");
    expect_step(test_path("back/checkpoints/step_00000060.left"), 60);
    CHECK(save(test_path("back"), 30, 0), "%s", why.text);
    CHECK(adopt(test_path("back/checkpoints/step_00000020"), test_path("back"), &settings) &&
              checkpoint_leave_later(test_path("back"), 20, &notes, &why) &&
              exists("back/checkpoints/step_00000030.left2"),
          "a second time");
    check_case("other settings from here on");
    CHECK(adopt(test_path("back"), test_path("back"), &other), "%s", why.text);
    expect_step(test_path("back"), 20);
    CHECK(lr_of(test_path("back")) == 0.125, "lr is %g", lr_of(test_path("back")));
    CHECK(!exists("back/checkpoints/step_00000020.old"), "the one before is gone");
    check_case("from another folder");
    CHECK(adopt(test_path("back/checkpoints/step_00000010"), test_path("away"), &other), "%s",
          why.text);
    expect_step(test_path("away"), 10);
    CHECK(lr_of(test_path("back/checkpoints/step_00000010")) == settings.train.lr,
          "that folder stays as it was");
    check_case("verification");
    checkpoint k;
    CHECK(checkpoint_open(&k, test_path("away"), &why) && checkpoint_verify(&k, &why), "%s",
          why.text);
    CHECK(!truncate(test_path("away/checkpoints/step_00000010/optimizer.safetensors"), 10), "cut");
    TEST_FAULT(checkpoint_verify(&k, &why), &why, "optimizer.safetensors: damaged: 10 bytes");
    checkpoint_close(&k);
}

/* ---- The best ---- */

static void save_with_loss(const char *out_dir, int64_t step, double loss, int64_t keep) {
    val_loss = loss;
    CHECK(save(out_dir, step, keep), "save: %s", why.text);
    val_loss = NAN;
}

/* Where `best` leads to; -1: nowhere. */
static int64_t best_of(const char *out_dir) {
    char path[4096];
    checkpoint k;
    snprintf(path, sizeof path, "%s/checkpoints/best", out_dir);
    if (!checkpoint_open(&k, path, &why)) return -1;
    checkpoint_close(&k);
    return k.state.step;
}

/* Writes a state with a checksum that fits what it holds now. */
static void dump_state(const char *path, json_t *root) {
    json_t *content = json_object_get(root, "content");
    char sum[24];
    char *text = json_dumps(content, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    snprintf(sum, sizeof sum, "%016" PRIx64, (uint64_t)XXH64(text, strlen(text), 0));
    json_object_set_new(root, "xxh64", json_string(sum));
    CHECK(!json_dump_file(root, path, JSON_REAL_PRECISION(17)), "write");
    free(text);
    json_decref(root);
}

/* A checkpoint from before there was a validation loss in it. */
static void make_older(const char *path) {
    json_t *root = json_load_file(path, 0, NULL), *content = json_object_get(root, "content");
    CHECK(!json_object_del(json_object_get(content, "state"), "val_loss"), "no val_loss");
    dump_state(path, root);
}

static void test_best(void) {
    static const double losses[] = {NAN, 3, 2, NAN, 2.5, 2, 4, 1.5};
    static const int64_t best[] = {-1, 2, 3, 3, 3, 3, 3, 8};
    listener notes = test_notes();
    check_case("best");
    for (int i = 0; i < 8; i++) {
        save_with_loss(test_path("best"), i + 1, losses[i], 2);
        CHECK(best_of(test_path("best")) == best[i], "after step %d: %" PRId64, i + 1,
              best_of(test_path("best")));
    }
    CHECK(!exists("best/checkpoints/step_00000002") && !exists("best/checkpoints/step_00000003"),
          "one that is no longer the best goes");
    for (int64_t step = 9; step <= 12; step++) save_with_loss(test_path("best"), step, NAN, 2);
    CHECK(exists("best/checkpoints/step_00000008") && !exists("best/checkpoints/step_00000010"),
          "the best stays");
    expect_step(test_path("best"), 12);
    check_case("latest and best as folders, of a copy that followed links");
    CHECK(!unlink(test_path("best/checkpoints/latest")) &&
              !unlink(test_path("best/checkpoints/best")),
          "they were links");
    test_mkdir("best/checkpoints/best");
    test_mkdir("best/checkpoints/latest");
    test_write_text(test_path("best/checkpoints/latest/state.json"), "kept");
    save_with_loss(test_path("best"), 13, 1, 0);
    CHECK(best_of(test_path("best")) == 13, "best is a link");
    CHECK(exists("best/checkpoints/latest.left/state.json"), "what was there is kept");
    check_case("best, going back");
    for (int i = 0; i < 6; i++) save_with_loss(test_path("ahead"), i + 1, 6 - i, 0);
    CHECK(best_of(test_path("ahead")) == 6, "the last");
    CHECK(adopt(test_path("ahead/checkpoints/step_00000004"), test_path("ahead"), &settings) &&
              checkpoint_leave_later(test_path("ahead"), 4, &notes, &why),
          "%s", why.text);
    CHECK(best_of(test_path("ahead")) == 4, "of what is left: %s", why.text);
    CHECK(adopt(test_path("ahead/checkpoints/step_00000002"), test_path("beside"), &settings) &&
              best_of(test_path("beside")) == 2,
          "in another folder: %s", why.text);
    check_case("best, of older checkpoints");
    make_older(test_path("beside/checkpoints/step_00000002/state.json"));
    CHECK(adopt(test_path("beside"), test_path("beside"), &settings), "%s", why.text);
    CHECK(best_of(test_path("beside")) == -1 && !exists("beside/checkpoints/best"), "none");
    save_with_loss(test_path("beside"), 3, 9, 1);
    CHECK(best_of(test_path("beside")) == 3, "the first that has a loss: %s", why.text);
}

/* ---- Damage ---- */

/* Puts a damaged copy of a file in its place; `change` gets the bytes. */
static void damage(const char *name, void (*change)(char *bytes, size_t *count)) {
    size_t count;
    char *bytes = test_read(test_path(name), &count);
    change(bytes, &count);
    test_write(test_path(name), bytes, count);
    free(bytes);
}

static void flip_last(char *bytes, size_t *count) {
    bytes[*count - 1] = (char)(bytes[*count - 1] ^ 4);
}

static void cut_short(char *bytes, size_t *count) {
    (void)bytes;
    --*count;
}

static void cut_half(char *bytes, size_t *count) {
    (void)bytes;
    *count /= 2;
}

static void other_step(char *bytes, size_t *count) {
    (void)count;
    char *at = strstr(bytes, "\"step\": 1");
    if (CHECK(at != NULL, "no step in the state")) at[8] = '2';
}

static void test_damage(void) {
    const char *model = "bad/checkpoints/step_00000001/model.safetensors";
    const char *state = "bad/checkpoints/step_00000001/state.json";
    check_case("damage");
    CHECK(save(test_path("bad"), 1, 3), "%s", why.text);
    damage(model, flip_last);
    refuse(test_path("bad"), "model.safetensors: damaged: its checksum is&state.json says");
    damage(model, flip_last);
    expect_step(test_path("bad"), 1);
    damage(model, cut_short);
    refuse(test_path("bad"), "model.safetensors: damaged:&bytes, state.json says");
    CHECK(save(test_path("bad"), 1, 3), "%s", why.text);
    damage(state, other_step);
    refuse(test_path("bad"), "state.json: damaged: its checksum is");
    damage(state, cut_half);
    refuse(test_path("bad"), "state.json:&not JSON");
    test_write_text(test_path(state), "{}");
    refuse(test_path("bad"), "state.json: not the state of a checkpoint");
    test_write_text(test_path(state), "");
    refuse(test_path("bad"), "state.json:&not JSON");
    CHECK(save(test_path("bad"), 1, 3), "over a damaged one: %s", why.text);
    expect_step(test_path("bad"), 1);
    unlink(test_path("bad/checkpoints/step_00000001/optimizer.safetensors"));
    refuse(test_path("bad"), "optimizer.safetensors: cannot open");
}

/* ---- A folder that somebody else made ---- */

/* A run's folder with links to what is not the run's: writing into it must not reach there. */
static void test_links(void) {
    check_case("links");
    test_mkdir("precious");
    test_write_text(test_path("precious/letter"), "dear");
    CHECK(save(test_path("linked"), 1, 0), "%s", why.text);
    const char *names[] = {".writing-step_00000003", ".removing-x", "step_00000001.old",
                           "step_00000002"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char link[256];
        snprintf(link, sizeof link, "linked/checkpoints/%s", names[i]);
        CHECK(!symlink("../../precious", test_path(link)), "link");
    }
    for (int64_t step = 1; step < 5; step++)
        CHECK(save(test_path("linked"), step, 1), "step %d: %s", (int)step, why.text);
    CHECK(exists("precious/letter"), "a link was followed when a folder was removed");
    CHECK(!exists("linked/checkpoints/.removing-x"), "the link itself is swept");
    expect_step(test_path("linked"), 4);
}

/* A checkpoint whose state lists a file by this name, with the bytes and checksum of its model. */
static void list_file(const char *state, const char *name) {
    json_t *root = json_load_file(state, 0, NULL);
    json_t *files = json_object_get(json_object_get(root, "content"), "files");
    json_object_set(files, name, json_object_get(files, "model.safetensors"));
    dump_state(state, root);
}

/* A name in state.json that leads out of the checkpoint's folder, or steers a terminal, is refused
   when it is read: by whoever opens, adopts, verifies or judges the checkpoint. */
static void test_names(void) {
    static const char *const names[] = {"../model.safetensors",
                                        "../../../.ssh/authorized_keys",
                                        "/tmp/model.safetensors",
                                        "a/model.safetensors",
                                        "./model.safetensors",
                                        "",
                                        ".",
                                        "..",
                                        ".safetensors",
                                        ".hidden.safetensors",
                                        "state.json",
                                        "latest",
                                        "a\n.safetensors",
                                        "\033[2J.safetensors",
                                        "\xc2\x9b"
                                        "2J.safetensors",
                                        "\xe2\x80\xae.safetensors",
                                        "0123456789012345678901234567890123456789"
                                        "0123456789012345678901234567890123456789.safetensors"};
    const char *state = "names/checkpoints/step_00000001/state.json";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        check_case("name %d", (int)i);
        CHECK(save(test_path("names"), 1, 0), "%s", why.text);
        list_file(test_path(state), names[i]);
        refuse(test_path("names"), "state.json: \"files\": \"&must be the name of a part");
        CHECK(!strpbrk(why.text, "\n\033\xc2\xe2"), "the message steers a terminal");
        CHECK(!adopt(test_path("names"), test_path("named"), &settings), "adopted");
        CHECK(!exists("named"), "something was written");
    }
}

/* What is adopted is plain files of the run: not links, nor their modes, nor somebody's file whose
   checksum is not the one that the state names. */
static void test_taken_files(void) {
    const char *from = "taken/checkpoints/step_00000001/model.safetensors";
    const char *to = "taker/checkpoints/step_00000001/model.safetensors";
    struct stat s;
    check_case("a link in a checkpoint");
    CHECK(save(test_path("taken"), 1, 0), "%s", why.text);
    CHECK(!rename(test_path(from), test_path("elsewhere")) &&
              !symlink("../../../elsewhere", test_path(from)),
          "link");
    CHECK(adopt(test_path("taken"), test_path("taker"), &settings), "%s", why.text);
    CHECK(!lstat(test_path(to), &s) && S_ISREG(s.st_mode) && s.st_nlink == 1, "a plain copy");
    expect_step(test_path("taker"), 1);
    check_case("a link to another file");
    test_write_text(test_path("private"), "a key");
    unlink(test_path(from));
    CHECK(!symlink("../../../private", test_path(from)), "link");
    TEST_FAULT(adopt(test_path("taken"), test_path("taker2"), &settings), &why,
               "model.safetensors: damaged: 5 bytes");
    CHECK(!exists("taker2/checkpoints/.writing-step_00000001"), "nothing of it stays");
    check_case("mode bits");
    unlink(test_path(from));
    CHECK(!rename(test_path("elsewhere"), test_path(from)) && !chmod(test_path(from), 06755),
          "mode");
    CHECK(adopt(test_path("taken"), test_path("taker3"), &settings), "%s", why.text);
    CHECK(!lstat(test_path("taker3/checkpoints/step_00000001/model.safetensors"), &s) &&
              !(s.st_mode & 07111),
          "mode %o", s.st_mode);
    check_case("a plain file is shared");
    CHECK(!chmod(test_path(from), 0644), "mode");
    CHECK(adopt(test_path("taken"), test_path("taker4"), &settings), "%s", why.text);
    CHECK(!lstat(test_path(from), &s) && s.st_nlink == 2, "%d names", (int)s.st_nlink);
    check_case("a folder, a device");
    unlink(test_path(from));
    test_mkdir(from);
    TEST_FAULT(adopt(test_path("taken"), test_path("taker5"), &settings), &why,
               "model.safetensors: must be a plain file");
    CHECK(!rmdir(test_path(from)) && !symlink("/dev/zero", test_path(from)), "device");
    TEST_FAULT(adopt(test_path("taken"), test_path("taker5"), &settings), &why,
               "model.safetensors: must be a plain file");
}

/* A file that is far too long is refused by its size, at once; its sum took a minute. */
static void test_long_file(void) {
    const char *model = "long/checkpoints/step_00000001/model.safetensors";
    struct timespec begin, end;
    check_case("a long file");
    CHECK(save(test_path("long"), 1, 0), "%s", why.text);
    if (truncate(test_path(model), (off_t)1 << 38)) return; /* no file has holes here */
    clock_gettime(CLOCK_MONOTONIC, &begin);
    refuse(test_path("long"), "model.safetensors: damaged: 274877906944 bytes, state.json says");
    CHECK(!chmod(test_path(model), 0666), "one that is not shared but copied");
    TEST_FAULT(adopt(test_path("long"), test_path("longer"), &settings), &why,
               "model.safetensors: damaged: 274877906944 bytes");
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK(end.tv_sec - begin.tv_sec < 20, "%d s", (int)(end.tv_sec - begin.tv_sec));
}

/* A state that says of itself that it is sound: with numbers that no run reaches, or as a pipe. */
static void test_hostile_state(void) {
    const char *state = "hostile/checkpoints/step_00000001/state.json";
    const char *model = "hostile/checkpoints/step_00000001/model.safetensors";
    config c = settings;
    checkpoint_state s = state_of(1);
    check_case("hostile");
    s.data.document = INT64_MAX;
    set_values(1);
    CHECK(checkpoint_write(test_path("hostile"), &c, &s, parts, 2, 0, &why), "%s", why.text);
    refuse(test_path("hostile"), "data.document must be an integer in 0 .. 2^48");
    static const double scales[] = {0, -1, NAN, 1e300};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        s = state_of(1);
        s.loss_scale = scales[i];
        CHECK(checkpoint_write(test_path("hostile"), &c, &s, parts, 2, 0, &why), "%s", why.text);
        refuse(test_path("hostile"), "loss_scale must be above 0, and at most 2^48");
    }
    CHECK(save(test_path("hostile"), 1, 0), "%s", why.text);
    json_t *root = json_load_file(test_path(state), 0, NULL);
    json_object_clear(json_object_get(json_object_get(root, "content"), "files"));
    dump_state(test_path(state), root);
    refuse(test_path("hostile"), "\"files\" must list model.safetensors");
    unlink(test_path(state));
    CHECK(!mkfifo(test_path(state), 0666), "pipe");
    refuse(test_path("hostile"), "state.json: must be a plain file");
    unlink(test_path(state));
    CHECK(save(test_path("hostile"), 1, 0), "%s", why.text);
    unlink(test_path(model));
    CHECK(!mkfifo(test_path(model), 0666), "pipe");
    refuse(test_path("hostile"), "model.safetensors: must be a plain file");
}

static void test_other_model(void) {
    checkpoint k;
    safetensors_tensor other = model_list[0];
    checkpoint_part part = {"model", &other, 1};
    check_case("another model");
    CHECK(save(test_path("other"), 1, 3), "%s", why.text);
    if (!CHECK(checkpoint_open(&k, test_path("other"), &why), "%s", why.text)) return;
    other.shape[0] = 6;
    other.shape[1] = WEIGHTS / 6;
    TEST_FAULT(checkpoint_load(&k, &part, &why), &why,
               "tensor w is F32 [3, 1000]; the model's is F32 [6, 500]");
    part.name = "weights";
    TEST_FAULT(checkpoint_load(&k, &part, &why), &why, "state.json does not list weights");
    checkpoint_close(&k);
}

/* ---- Disks that are full, folders that cannot be written ---- */

static void test_full_disk(void) {
    struct rlimit before, small;
    check_case("full disk");
    CHECK(save(test_path("full"), 1, 1), "%s", why.text);
    getrlimit(RLIMIT_FSIZE, &before);
    for (rlim_t bytes = 0; bytes < 13000; bytes += 1200) {
        small = before;
        small.rlim_cur = bytes;
        setrlimit(RLIMIT_FSIZE, &small);
        bool ok = save(test_path("full"), 2, 1);
        setrlimit(RLIMIT_FSIZE, &before);
        check_case("full disk after %d bytes a file", (int)bytes);
        if (bytes < 12000) TEST_FAULT(ok, &why, "full/checkpoints/&cannot write&File too large");
        expect_step(test_path("full"), ok ? 2 : 1);
        CHECK(!exists("full/checkpoints/.writing-step_00000002"), "what was written is removed");
    }
    test_write_text(test_path("file"), "");
    TEST_FAULT(save(test_path("file"), 1, 1), &why, "file/checkpoints: cannot make the folder");
    if (geteuid()) {
        CHECK(!chmod(test_path("full/checkpoints"), 0555), "chmod");
        TEST_FAULT(save(test_path("full"), 3, 1), &why, "cannot make the folder&Permission denied");
        CHECK(!chmod(test_path("full/checkpoints"), 0777), "chmod");
    }
}

/* ---- Kills ---- */

/* Saves step after step, and tells of each that is done. */
static void save_until_killed(int report) {
    for (int64_t step = 1;; step++) {
        if (!save(test_path("kill"), step, 1 + step % 3)) _exit(1);
        if (write(report, &step, sizeof step) != sizeof step) _exit(1);
    }
}

static void test_kill(void) {
    int64_t done = 0, total = 0;
    for (int round = 0; round < 40; round++) {
        int fds[2];
        struct timespec nap = {0, check_below(12000000, 9, (uint64_t)round)};
        check_case("kill %d", round);
        CHECK(!pipe(fds), "pipe");
        pid_t child = fork();
        if (!child) {
            close(fds[0]);
            save_until_killed(fds[1]);
        }
        close(fds[1]);
        int64_t step = 0;
        for (int saves = check_below(3, 10, (uint64_t)round); saves >= 0; saves--)
            if (read(fds[0], &step, sizeof step) == sizeof step) done = step;
        nanosleep(&nap, NULL);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        while (read(fds[0], &step, sizeof step) == sizeof step) done = step;
        close(fds[0]);
        int64_t found = load(test_path("kill"));
        CHECK(found == done || found == done + 1,
              "found step %" PRId64 ", %" PRId64 " was done: %s", found, done, why.text);
        total += done;
    }
    CHECK(total >= 40, "%" PRId64 " checkpoints in all", total);
    CHECK(save(test_path("kill"), 1000, 1), "after all that: %s", why.text);
    DIR *folder = opendir(test_path("kill/checkpoints"));
    int names = 0;
    while (folder && readdir(folder)) names++;
    if (folder) closedir(folder);
    CHECK(names == 4, "%d names are left, must be one checkpoint, latest and two dots", names);
}

int main(void) {
    config_program program = {.name = "test", .summary = ""};
    listener notes = test_notes();
    char *argv[] = {"test", "--dataset=synthetic"};
    signal(SIGXFSZ, SIG_IGN);
    CHECK(config_load(&settings, &program, 2, argv, &notes, &why) == OPTION_OK, "%s", why.text);
    test_begin();
    test_round_trip();
    test_retention();
    test_keep_every();
    test_latest();
    test_torn();
    test_adopt();
    test_best();
    test_damage();
    test_links();
    test_names();
    test_taken_files();
    test_long_file();
    test_hostile_state();
    test_other_model();
    test_full_disk();
    test_kill();
    return test_end("test_checkpoint");
}
