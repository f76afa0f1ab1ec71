/* test_anomaly.c - what halts a run and what does not: each rule on both sides of its limit,
   with a clock that is made up; and the files. Twin: anomaly.c. */
#include "telemetry/anomaly.h"
#include "trainer_test.h"

static fault why;

static const stats sound = {.entropy_mean = 1.0, .max_gate = 0.4, .gate_sum = 1.5};

static anomaly_step step_at(double toks_per_s) {
    anomaly_step s = {
        .loss = 2, .grad_norm = 1, .seconds = 1024 / toks_per_s, .toks_per_s = toks_per_s};
    s.stats = &sound;
    return s;
}

/* ---- Steps ---- */

/* The anomaly of the last of `count` such steps; those before must have none. */
static anomaly last_of(anomaly_watch *w, anomaly_step s, int count) {
    anomaly a = ANOMALY_NONE;
    for (int i = 0; i < count; i++) {
        CHECK(!a, "step %d: %s before its time", i, anomaly_name(a));
        a = anomaly_of_step(w, &s, &why);
    }
    return a;
}

static void expect(anomaly got, anomaly want) {
    CHECK(got == want, "%s, must be %s (%s)", anomaly_name(got), anomaly_name(want), why.text);
}

static void test_numbers(void) {
    static const double bad[][2] = {
        {NAN, 1}, {INFINITY, 1}, {2, NAN}, {2, INFINITY}, {2, -INFINITY}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        anomaly_watch w = {.timeout = 180};
        anomaly_step s = step_at(1000);
        check_case("loss %g, norm %g", bad[i][0], bad[i][1]);
        s.loss = bad[i][0];
        s.grad_norm = bad[i][1];
        expect(anomaly_of_step(&w, &s, &why), ANOMALY_NAN);
        s.skipped = true;
        expect(anomaly_of_step(&w, &s, &why), ANOMALY_NONE);
    }
    anomaly_watch w = {.timeout = 180};
    anomaly_step s = step_at(1000);
    check_case("gradients");
    s.grad_norm = 1e-300;
    expect(anomaly_of_step(&w, &s, &why), ANOMALY_NONE);
    s.grad_norm = 0;
    expect(anomaly_of_step(&w, &s, &why), ANOMALY_ZERO_GRADIENT);
    s.loss = 0; /* no labels */
    expect(anomaly_of_step(&w, &s, &why), ANOMALY_NONE);
}

static void test_gates(void) {
    static const struct {
        stats s;
        bool collapsed;
    } cases[] = {
        {{.entropy_mean = 0.19, .max_gate = 0.5, .gate_sum = 1}, true},
        {{.entropy_mean = 0.21, .max_gate = 0.5, .gate_sum = 1}, false},
        {{.entropy_mean = 0.5, .max_gate = 0.91, .gate_sum = 1}, true},
        {{.entropy_mean = 0.5, .max_gate = 0.89, .gate_sum = 1}, false},
        {{.entropy_mean = 0.5, .max_gate = 0.5, .collapse_frac = 0.5, .gate_sum = 1}, true},
        {{.entropy_mean = 0.5, .max_gate = 0.5, .collapse_frac = 0.49, .gate_sum = 1}, false},
        {{.entropy_mean = 1.0986, .max_gate = 0.34, .gate_sum = 0.009}, true}, /* all shut */
        {{.entropy_mean = 1.0986, .max_gate = 0.34, .gate_sum = 0.011}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        anomaly_watch w = {.timeout = 180};
        anomaly_step s = step_at(1000);
        check_case("gates %zu", i);
        s.stats = &cases[i].s;
        expect(last_of(&w, s, 2), ANOMALY_NONE);
        s.stats = &sound; /* a sound step between: counting starts anew */
        expect(last_of(&w, s, 1), ANOMALY_NONE);
        s.stats = &cases[i].s;
        expect(last_of(&w, s, 3), cases[i].collapsed ? ANOMALY_GATES : ANOMALY_NONE);
    }
    anomaly_watch w = {.timeout = 180};
    anomaly_step s = step_at(1000);
    s.stats = NULL;
    expect(last_of(&w, s, 20), ANOMALY_NONE);
}

/* One layer of many is told of once, and again when it is joined by another. */
static void test_layers(void) {
    anomaly_watch w = {.timeout = 180};
    anomaly_step s = step_at(1000);
    stats one = sound, two = sound;
    check_case("gates of a layer");
    one.layers_collapsed = 1;
    two.layers_collapsed = 1, two.layers_shut = 1, two.first_shut = 3;
    s.stats = &sound;
    expect(last_of(&w, s, 5), ANOMALY_NONE);
    s.stats = &one;
    expect(last_of(&w, s, 1), ANOMALY_LAYER);
    expect(last_of(&w, s, 9), ANOMALY_NONE);
    s.stats = &two;
    expect(last_of(&w, s, 1), ANOMALY_LAYER);
    expect(last_of(&w, s, 9), ANOMALY_NONE);
    s.stats = &one;
    expect(last_of(&w, s, 9), ANOMALY_NONE);
}

static void test_rate(void) {
    anomaly_watch w = {.timeout = 180};
    check_case("a rate that collapses");
    expect(last_of(&w, step_at(1000), 50), ANOMALY_NONE);
    expect(last_of(&w, step_at(10), 1), ANOMALY_NONE); /* 102 s */
    expect(last_of(&w, step_at(1000), 1), ANOMALY_NONE);
    expect(last_of(&w, step_at(10), 3), ANOMALY_FLAT); /* 3 steps, 307 s */
    check_case("a pause of three short steps");
    anomaly_watch shorter = {.timeout = 180};
    expect(last_of(&shorter, step_at(1e6), 50), ANOMALY_NONE);
    expect(last_of(&shorter, step_at(2e4), 40), ANOMALY_NONE); /* 2 s in all */
    check_case("a run that gets slower and slower, each step a tenth");
    anomaly_watch slower = {.timeout = 180};
    for (double rate = 1e4; rate > 1; rate *= 0.9)
        expect(last_of(&slower, step_at(rate), 1), ANOMALY_NONE);
    check_case("a run that is always slow");
    anomaly_watch slow = {.timeout = 180};
    expect(last_of(&slow, step_at(3), 200), ANOMALY_NONE);
    check_case("switched off");
    anomaly_watch off = {.timeout = 0};
    expect(last_of(&off, step_at(1000), 50), ANOMALY_NONE);
    expect(last_of(&off, step_at(0.1), 50), ANOMALY_NONE);
}

/* ---- Time ---- */

static uint32_t word(phase p, int layer) {
    return (uint32_t)p << 16 | (uint32_t)(layer + 1);
}

/* Looks twice a second from *now for `seconds`; when an anomaly was seen, or -1. */
static double look(anomaly_watch *w, double *now, double seconds, uint32_t x, int64_t step) {
    for (double end = *now + seconds; *now < end;) {
        *now += 0.5;
        if (anomaly_of_time(w, *now, x, step, &why)) return *now;
    }
    return -1;
}

static void test_stall(void) {
    static const phase inside[] = {PHASE_FWD,  PHASE_BWD,  PHASE_OPT,
                                   PHASE_COMM, PHASE_EVAL, PHASE_SAMPLE};
    static const phase outside[] = {PHASE_BOOT, PHASE_DATA, PHASE_SAVE, PHASE_END};
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++) {
        anomaly_watch w = {.timeout = 180};
        double now = 1000;
        check_case("stall in %s", phase_name(inside[i]));
        CHECK(look(&w, &now, 179, word(inside[i], 3), 7) < 0, "before its time: %s", why.text);
        CHECK(look(&w, &now, 5, word(inside[i], 3), 7) > 0, "not seen");
        CHECK(strstr(why.text, "step 8: no progress for 180 s in phase") &&
                  strstr(why.text, "layer 3"),
              "%s", why.text);
    }
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        anomaly_watch w = {.timeout = 180};
        double now = 0;
        check_case("a day in %s", phase_name(outside[i]));
        CHECK(look(&w, &now, 86400, word(outside[i], -1), 7) < 0, "%s", why.text);
    }
    anomaly_watch off = {.timeout = 0}, stopped = {.timeout = 180};
    double now = 0;
    check_case("switched off");
    CHECK(look(&off, &now, 86400, word(PHASE_BWD, 1), 7) < 0, "%s", why.text);
    check_case("a process that was stopped for an hour");
    look(&stopped, &now, 10, word(PHASE_BWD, 1), 7);
    now += 3600;
    CHECK(look(&stopped, &now, 100, word(PHASE_BWD, 1), 7) < 0, "%s", why.text);
}

/* Twelve layers of two minutes each: a step takes most of an hour, and there is progress all the
   time. */
static void test_slow(void) {
    anomaly_watch w = {.timeout = 180};
    double now = 0;
    check_case("steps of 48 minutes");
    for (int64_t step = 0; step < 20; step++)
        for (int layer = 0; layer < 24; layer++) {
            phase p = layer < 12 ? PHASE_FWD : PHASE_BWD;
            CHECK(look(&w, &now, 120, word(p, layer < 12 ? layer : 23 - layer), step) < 0, "%s",
                  why.text);
        }
    check_case("one layer, seen in the same phase of every step");
    for (int64_t step = 0; step < 1000; step++)
        CHECK(look(&w, &now, 1, word(PHASE_FWD, 0), step) < 0, "%s", why.text);
}

/* ---- Files ---- */

static void expect_file(const char *name, const char *want) {
    size_t bytes;
    char *got = test_read(test_path(name), &bytes);
    CHECK(got && !strcmp(got, want), "%s: \"%s\", must be \"%s\"", name, got, want);
    free(got);
}

static void test_files(void) {
    check_case("files");
    CHECK(anomaly_write(test_root, ANOMALY_FLAT, "step 3: why", &why), "%s", why.text);
    expect_file(".anomaly_type", "flat_throughput\n");
    expect_file(".HALT", "flat_throughput: step 3: why\n");
    CHECK(anomaly_write(test_root, ANOMALY_NAN, "step 4: why", &why), "%s", why.text);
    expect_file(".HALT", "flat_throughput: step 3: why\n"); /* the first one's stays */
    TEST_FAULT(anomaly_write(test_path("nowhere"), ANOMALY_NAN, "", &why), &why,
               "nowhere/.anomaly_type");
}

int main(void) {
    test_begin();
    test_numbers();
    test_gates();
    test_layers();
    test_rate();
    test_stall();
    test_slow();
    test_files();
    return test_end("test_anomaly");
}
