/* test_quota.c - how many threads a control group's quota pays for, and how much memory it gives,
   in trees of files like the kernel's, and what train_tiny makes of too many and too much. Twins:
   base/threads.c, memory.c, cgroup.c. Not here: how threads wait. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>

#include "base/cgroup.h"
#include "base/memory.h"
#include "base/threads.h"
#include "trainer_test.h"

static void quota(const char *group, const char *text) {
    char path[1024];
    snprintf(path, sizeof path, "%s%s", test_root, group);
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%s%s/cpu.max", test_root, group);
    test_write(path, text, strlen(text));
}

static void test_quotas(void) {
    static const struct {
        const char *text;
        int threads;
    } cases[] = {{"max 100000\n", INT_MAX},
                 {"200000 100000\n", 2},
                 {"50000 100000\n", 1},
                 {"150000 100000\n", 2},
                 {"1000 100000\n", 1},
                 {"300000 50000\n", 6},
                 {"", INT_MAX},
                 {"0 100000\n", INT_MAX},
                 {"7 0\n", INT_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case("cpu.max \"%s\"", cases[i].text);
        quota("", cases[i].text);
        int got = threads_of_quota(test_root, "/");
        CHECK(got == cases[i].threads, "%d threads, %d expected", got, cases[i].threads);
    }
}

/* The least of a group's own and its parents' holds; a group that is not there has its parents'. */
static void test_parents(void) {
    static const struct {
        const char *group;
        int threads;
    } cases[] = {{"/", 8}, {"", 8}, {"/a", 3}, {"/a/b", 3}, {"/a/c", 1}, {"/a/none/of", 3}};
    quota("", "800000 100000");
    quota("/a", "300000 100000");
    quota("/a/b", "500000 100000");
    quota("/a/c", "100000 100000");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case("group %s", cases[i].group);
        int got = threads_of_quota(test_root, cases[i].group);
        CHECK(got == cases[i].threads, "%d threads, %d expected", got, cases[i].threads);
    }
    CHECK(threads_of_quota("/no/such/folder", "/") == INT_MAX, "no control groups, no quota");
}

/* Memory of a group, of versions 1 and 2, in trees like the kernel's; no swap is counted that the
   machine has not. */
static void test_memory(void) {
    static const struct {
        const char *group, *file, *text;
        double bytes;
        bool first; /* version 1 */
    } cases[] = {{"/m", "memory.max", "max\n", INFINITY, false},
                 {"/m", "memory.max", "1048576\n", 1048576, false},
                 {"/m", "memory.max", "", INFINITY, false},
                 {"/m/n", "memory.max", "2097152\n", 1048576, false},
                 {"/m/n", "memory.max", "524288\n", 524288, false},
                 {"/v", "memory.limit_in_bytes", "9223372036854771712\n", INFINITY, true},
                 {"/v", "memory.limit_in_bytes", "1048576\n", 1048576, true},
                 {"/v/w", "memory.limit_in_bytes", "9223372036854771712\n", 1048576, true}};
    struct sysinfo s;
    CHECK(!sysinfo(&s), "no sysinfo");
    double swap = (double)s.totalswap * s.mem_unit;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case("%s of %s", cases[i].file, cases[i].group);
        if (i == 3) { /* its parent's holds */
            snprintf(test_said, sizeof test_said, "%s/m/memory.max", test_root);
            test_write_text(test_said, "1048576\n");
        }
        char path[1024];
        snprintf(path, sizeof path, "%s%s", test_root, cases[i].group);
        mkdir(path, 0777);
        snprintf(path, sizeof path, "%s%s/%s", test_root, cases[i].group, cases[i].file);
        test_write_text(path, cases[i].text);
        double got = cgroup_least(test_root, cases[i].group,
                                  cases[i].first ? memory_of_group_1 : memory_of_group);
        CHECK(got == cases[i].bytes + swap, "%g bytes", got);
    }
    check_case("memory of this process");
    fault why;
    double limit = memory_limit();
    CHECK(limit > 1 << 20, "%g bytes", limit);
    CHECK(memory_fits("x", 1 << 16, &why), "%s", why.text);
    TEST_FAULT(memory_fits("x", (size_t)limit, &why), &why, "x: no memory for&in use&may have");
}

/* More than the machine has is refused before the first line, not killed in the middle of it. */
static void test_too_large(const char *program) {
    char line[1024], said[4096] = "";
    check_case("a model that no machine holds");
    snprintf(line, sizeof line,
             "%s --dataset synthetic --steps 1 --dim 65536 --layers 256 --out-dir %s/large 2>&1",
             program, test_root);
    FILE *out = popen(line, "r");
    while (out && fgets(line, sizeof line, out))
        snprintf(said + strlen(said), sizeof said - strlen(said), "%s", line);
    int status = out ? pclose(out) : -1;
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 2, "status %d: %s", status, said);
    CHECK(strstr(said, "model: no memory for ") && strstr(said, "control group"), "%s", said);
}

/* Small stacks of threads: what needs room takes it elsewhere. */
static void test_stacks(const char *program) {
    static const char *const limits[] = {"OMP_STACKSIZE=64k", "ulimit -s 256;"};
    char line[1024];
    for (int i = 0; i < 2; i++) {
        check_case("%s", limits[i]);
        snprintf(line, sizeof line,
                 "%s %s --dataset synthetic --steps 2 --layers 2 --dim 256 --heads 4 --kv-groups 2 "
                 "--seq-len 512 --batch-size 2 --threads 2 --out-dir %s/stack%d >/dev/null 2>&1",
                 limits[i], program, test_root, i);
        CHECK(system(line) == 0, "it died");
    }
}

/* The team of a run: what follows the precision in the line that says what runs. */
static void team_of(const char *line, int *threads) {
    const char *at = strstr(line, "| cpu, ");
    if (at) sscanf(at, "| cpu, %*[^,], %d threads", threads);
}

/* As many as there are at most, and one line for whoever asks for more; the default is what there
   is, or what OMP_NUM_THREADS asks for. */
static void test_trainer(const char *program) {
    char command[4096], line[1024];
    int available = threads_available();
    const struct {
        int setting, of_openmp; /* 0: not given */
    } asked[] = {{0, 0}, {available, 0}, {available + 62, 0}, {0, available + 62}, {1, 64}};
    CHECK(available >= 1, "%d available", available);
    for (int i = 0; i < 5; i++) {
        int wanted = asked[i].setting ? asked[i].setting : asked[i].of_openmp;
        int want = wanted && wanted < available ? wanted : available, lines = 0, threads = 0;
        check_case("--threads %d, OMP_NUM_THREADS %d, of %d", asked[i].setting, asked[i].of_openmp,
                   available);
        snprintf(line, sizeof line, "OMP_NUM_THREADS=%d", asked[i].of_openmp);
        snprintf(command, sizeof command,
                 "env -u OMP_NUM_THREADS %s %s --steps 1 --layers 1 --dim 16 --heads 2 "
                 "--kv-groups 1 --seq-len 64 --batch-size 1 --dataset synthetic --threads %d "
                 "--out-dir %s/run%d 2>&1",
                 asked[i].of_openmp ? line : "", program, asked[i].setting, test_root, i);
        FILE *said = popen(command, "r");
        while (said && fgets(line, sizeof line, said)) {
            lines += strstr(line, "runtime.threads:") != NULL;
            team_of(line, &threads);
        }
        int status = said ? pclose(said) : -1;
        CHECK(status == 0, "exit %d of %s", status, command);
        CHECK(threads == want, "%d threads, not %d", threads, want);
        CHECK(lines == (wanted > available), "%d lines speak of threads", lines);
    }
}

int main(int argc, char **argv) {
    test_begin();
    test_quotas();
    test_parents();
    test_memory();
    if (argc > 1) {
        test_trainer(argv[1]);
        test_too_large(argv[1]);
        test_stacks(argv[1]);
    }
    return test_end("test_quota");
}
