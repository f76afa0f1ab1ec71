/* test_safetensors.c - the file format: what is written is what the format's description says, what
   is read back has the same bits, and every kind of damage is refused by name. */
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/resource.h>
#include <xxhash.h>

#include "checkpoint/safetensors.h"
#include "trainer_test.h"

static fault why;
static float weights[6] = {1, -2, 3.5f, 0, 1e-30f, 6};
static double moments[2] = {0.1, -1e300};
static uint16_t halves[5] = {0x3c00, 0x7e00, 0, 1, 0xffff};
static int64_t counters[1] = {INT64_MIN};

static const safetensors_tensor sample[] = {
    {"layer.0.weight", SAFETENSORS_F32, 2, {2, 3}, weights},
    {"m \"quoted\" \xc3\xa9", SAFETENSORS_F64, 1, {2}, moments},
    {"h", SAFETENSORS_BF16, 1, {5}, halves},
    {"scalar", SAFETENSORS_I64, 0, {0}, counters},
    {"nothing", SAFETENSORS_F16, 3, {2, 0, 3}, halves},
};
enum { TENSORS = sizeof sample / sizeof sample[0] };

static const char *write_sample(void) {
    uint64_t bytes, xxh64;
    const char *path = test_path("sample.safetensors");
    CHECK(safetensors_write(path, sample, TENSORS, &bytes, &xxh64, &why), "write: %s", why.text);
    size_t count;
    char *file = test_read(path, &count);
    CHECK(count == bytes && XXH64(file, count, 0) == xxh64, "size and checksum");
    free(file);
    return path;
}

/* The layout, byte by byte. */
static void test_layout(void) {
    size_t count;
    check_case("layout");
    char *file = test_read(write_sample(), &count);
    uint64_t header = 0;
    for (int i = 7; i >= 0; i--) header = header << 8 | (unsigned char)file[i];
    CHECK(header % 8 == 0 && header + 8 < count, "header of %d bytes", (int)header);
    char *text = calloc(1, header + 1);
    memcpy(text, file + 8, header);
    CHECK(strstr(text,
                 "\"layer.0.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}"),
          "header: %s", text);
    CHECK(strstr(text, "\"h\":{\"dtype\":\"BF16\",\"shape\":[5],\"data_offsets\":[40,50]}"),
          "header: %s", text);
    CHECK(strstr(text, "\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[50,58]}"),
          "header: %s", text);
    const char *data = file + 8 + header;
    CHECK_BITS("weights", data, weights, sizeof weights, 4);
    CHECK_BITS("moments", data + 24, moments, sizeof moments, 8);
    CHECK_BITS("halves", data + 40, halves, sizeof halves, 2);
    CHECK(count == 8 + header + 58, "%d bytes", (int)count);
    free(text);
    free(file);
}

static void test_round_trip(void) {
    float w[6] = {0};
    double m[2] = {0};
    uint16_t h[5] = {0}, none[1];
    int64_t c[1] = {0};
    void *into[TENSORS] = {w, m, h, c, none};
    safetensors_tensor list[TENSORS];
    check_case("round trip");
    for (int i = 0; i < TENSORS; i++) {
        list[TENSORS - 1 - i] = sample[i]; /* any order will do */
        list[TENSORS - 1 - i].data = into[i];
    }
    safetensors_file *file = safetensors_open(write_sample(), &why);
    if (!CHECK(file != NULL, "open: %s", why.text)) return;
    CHECK(safetensors_count(file) == TENSORS, "%d tensors", (int)safetensors_count(file));
    safetensors_tensor first = safetensors_info(file, 0);
    CHECK(!strcmp(first.name, "layer.0.weight") && first.dims == 2 && first.shape[1] == 3 &&
              first.dtype == SAFETENSORS_F32,
          "info of the first");
    CHECK(safetensors_load(file, list, TENSORS, &why), "load: %s", why.text);
    CHECK_BITS("weights", w, weights, sizeof w, 4);
    CHECK_BITS("moments", m, moments, sizeof m, 8);
    CHECK_BITS("halves", h, halves, sizeof h, 2);
    CHECK_BITS("counters", c, counters, sizeof c, 8);

    list[0].shape[0] = 3; /* "nothing" */
    TEST_FAULT(safetensors_load(file, list, TENSORS, &why), &why,
               "tensor nothing is F16 [2, 0, 3]; the model's is F16 [3, 0, 3]");
    list[0].shape[0] = 2;
    list[4].dtype = SAFETENSORS_I32;
    TEST_FAULT(safetensors_load(file, list, TENSORS, &why), &why,
               "tensor layer.0.weight is F32 [2, 3]; the model's is I32 [2, 3]");
    list[4].dtype = SAFETENSORS_F32;
    list[4].name = "layer.1.weight";
    TEST_FAULT(safetensors_load(file, list, TENSORS, &why), &why,
               "tensor layer.1.weight is missing");
    TEST_FAULT(safetensors_load(file, list, TENSORS - 1, &why), &why,
               "tensor layer.0.weight is none of the model's");
    safetensors_close(file);
}

/* ---- Files that are wrong ---- */

static void refuse_bytes(const char *bytes, size_t count, const char *words) {
    check_case("%s", words);
    test_write(test_path("bad.safetensors"), bytes, count);
    safetensors_file *file = safetensors_open(test_path("bad.safetensors"), &why);
    TEST_FAULT(file != NULL, &why, words);
    TEST_FAULT(file != NULL, &why, "bad.safetensors");
    safetensors_close(file);
}

/* A file with this header and `data` bytes behind it. */
static void refuse(const char *header, size_t data, const char *words) {
    static char file[4096];
    size_t length = strlen(header);
    for (int i = 0; i < 8; i++) file[i] = (char)((uint64_t)length >> (8 * i));
    memcpy(file + 8, header, length);
    memset(file + 8 + length, 0, data);
    refuse_bytes(file, 8 + length + data, words);
}

static void test_hostile(void) {
    refuse_bytes("", 0, "shorter than 8 bytes");
    refuse_bytes("\1\0\0\0\0\0\0", 7, "shorter than 8 bytes");
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\n";
    refuse_bytes(pointer, sizeof pointer - 1, "a pointer of Git LFS&git lfs pull");
    refuse_bytes("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10,
                 "header is said to be 18446744073709551615");
    refuse_bytes("\3\0\0\0\0\0\0\0{}", 10, "header is said to be 3 bytes; the file has 10");
    refuse_bytes("\xff\xff\xff\x7f\0\0\0\0{}", 10, "header is said to be 2147483647");
    refuse("", 0, "not JSON");
    refuse("{]", 0, "not JSON");
    refuse("[]", 0, "the header must be a JSON object");
    refuse("{\"a\":1,\"a\":1}", 0, "not JSON: duplicate");
    refuse("{\"a\":1}", 0, "tensor a: dtype must be one of");
    refuse("{\"a\":{\"dtype\":\"F8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "tensor a: dtype");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4,
           "tensor a: shape");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4,
           "tensor a: shape");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
           "tensor a: shape must be a list of at most 8");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}",
           0, "tensor a: shape&product is below 2^63");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
           "tensor a: shape&product is below 2^63");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775808],\"data_offsets\":[0,0]}}", 0,
           "not JSON");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor a: data_offsets must be two");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4,
           "data_offsets must be two");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 3,
           "tensor a: data_offsets 0 .. 4 must lie in the file's 3 bytes");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4,
           "tensor a: data_offsets -4 .. 0 must lie");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "must lie in");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4,
           "tensor a: 4 bytes of data; its shape needs 8");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
           "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
           8, "tensor b: begins at byte 0 of the data, must begin where the one before ends, at 4");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8,
           "tensor a: begins at byte 4 of the data, must begin&at 0");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 8,
           "8 bytes of data, of which the tensors cover 4");
    check_case("absent");
    TEST_FAULT(safetensors_open(test_path("nowhere"), &why) != NULL, &why, "nowhere: cannot open");
    TEST_FAULT(safetensors_open(test_root, &why) != NULL, &why, "must be a plain file");
    check_case("a named pipe, which nobody writes to");
    CHECK(!mkfifo(test_path("pipe"), 0666), "pipe");
    TEST_FAULT(safetensors_open(test_path("pipe"), &why) != NULL, &why,
               "pipe: must be a plain file");
    check_case("a name that would steer a terminal");
    refuse("{\"\\u001b[2J\\nok\":1}", 0, "tensor ?[2J?ok: dtype");
    CHECK(!strpbrk(why.text, "\x1b\n"), "control bytes in a message");
}

/* A file cut at any length, or with any one byte of its header changed, is refused or is
   harmless. */
static void test_every_byte(void) {
    size_t count;
    char *file = test_read(write_sample(), &count);
    float w[6];
    double m[2];
    uint16_t h[5], none[1];
    int64_t c[1];
    void *into[TENSORS] = {w, m, h, c, none};
    safetensors_tensor list[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        list[i] = sample[i];
        list[i].data = into[i];
    }
    for (size_t n = 0; n < count; n++) {
        check_case("cut at %d", (int)n);
        test_write(test_path("cut"), file, n);
        TEST_FAULT(safetensors_open(test_path("cut"), &why) != NULL, &why, "cut");
    }
    for (size_t n = 0; n + 58 < count; n++)
        for (int bit = 0; bit < 8; bit++) {
            file[n] = (char)(file[n] ^ 1 << bit);
            test_write(test_path("cut"), file, count);
            safetensors_file *f = safetensors_open(test_path("cut"), &why);
            if (f) safetensors_load(f, list, TENSORS, &why); /* under sanitizers: no stray access */
            safetensors_close(f);
            file[n] = (char)(file[n] ^ 1 << bit);
        }
    free(file);
}

/* ---- Disks that are full ---- */

/* Files that were begun and never ended. */
static int left(void) {
    int count = 0;
    DIR *d = opendir(test_root);
    for (struct dirent *e; d && (e = readdir(d));) count += strstr(e->d_name, ".tmp") != NULL;
    if (d) closedir(d);
    return count;
}

static void test_full_disk(void) {
    uint64_t bytes, xxh64;
    struct rlimit before, small = {100, 100};
    const char *path = test_path("full.safetensors");
    check_case("full disk");
    if (!access("/dev/full", W_OK)) {
        CHECK(!symlink("/dev/full", path), "link to /dev/full");
        TEST_FAULT(safetensors_write(path, sample, TENSORS, &bytes, &xxh64, &why), &why,
                   "full.safetensors: cannot&No space left");
        CHECK(!access("/dev/full", F_OK), "the device is gone");
        unlink(path);
    }
    CHECK(!mkfifo(path, 0600), "a named pipe");
    TEST_FAULT(safetensors_write(path, sample, TENSORS, &bytes, &xxh64, &why), &why,
               "full.safetensors: a named pipe that nobody reads");
    int reader = open(path, O_RDONLY | O_NONBLOCK);
    char first;
    CHECK(safetensors_write(path, sample, TENSORS, &bytes, &xxh64, &why), "%s", why.text);
    CHECK(read(reader, &first, 1) == 1 && !access(path, F_OK), "a pipe that is read");
    close(reader);
    unlink(path);
    getrlimit(RLIMIT_FSIZE, &before);
    small.rlim_max = before.rlim_max;
    setrlimit(RLIMIT_FSIZE, &small);
    bool ok = safetensors_write(path, sample, TENSORS, &bytes, &xxh64, &why);
    setrlimit(RLIMIT_FSIZE, &before);
    TEST_FAULT(ok, &why, "full.safetensors: cannot write&File too large");
    CHECK(access(path, F_OK), "half a file is left");
    CHECK(left() == 0, "%d files beside it", left());
    TEST_FAULT(
        safetensors_write(test_path("no/such/folder"), sample, TENSORS, &bytes, &xxh64, &why), &why,
        "no/such/folder: cannot create");
    safetensors_tensor twice[] = {sample[0], sample[0]};
    TEST_FAULT(safetensors_write(path, twice, 2, &bytes, &xxh64, &why), &why,
               "tensor layer.0.weight: its name is given twice");
}

/* A file of that name, and one that a link leads to, stays as it is until the new one is whole; it
   keeps its mode, and other names of it keep what it was. */
static void test_older_file(void) {
    uint64_t bytes, xxh64;
    size_t count;
    struct stat s;
    struct rlimit before, small = {100, 100};
    const char *path = test_path("older.safetensors"), *link = test_path("older_link");
    getrlimit(RLIMIT_FSIZE, &before);
    small.rlim_max = before.rlim_max;
    CHECK(!symlink("older.safetensors", link), "link");
    for (int i = 0; i < 2; i++) {
        check_case("an older file, %s", i ? "by a link" : "by its name");
        const char *given = i ? link : path;
        unlink(path);
        test_write_text(path, "of last week");
        CHECK(!chmod(path, 0640), "mode");
        setrlimit(RLIMIT_FSIZE, &small);
        bool ok = safetensors_write(given, sample, TENSORS, &bytes, &xxh64, &why);
        setrlimit(RLIMIT_FSIZE, &before);
        TEST_FAULT(ok, &why, "cannot write&File too large");
        char *text = test_read(path, &count);
        CHECK(count == 12 && !memcmp(text, "of last week", 12), "it is lost: %zu bytes", count);
        free(text);
        unlink(test_path("other_name"));
        CHECK(!linkat(AT_FDCWD, path, AT_FDCWD, test_path("other_name"), 0), "a second name");
        CHECK(safetensors_write(given, sample, TENSORS, &bytes, &xxh64, &why), "%s", why.text);
        CHECK(!stat(path, &s) && s.st_size == (off_t)bytes && (s.st_mode & 0777) == 0640,
              "%lld bytes, mode %o", (long long)s.st_size, s.st_mode);
        CHECK(!stat(test_path("other_name"), &s) && s.st_size == 12, "its other name is new too");
        CHECK(!lstat(link, &s) && S_ISLNK(s.st_mode), "the link is gone");
    }
}

int main(void) {
    signal(SIGXFSZ, SIG_IGN);
    test_begin();
    test_layout();
    test_round_trip();
    test_hostile();
    test_every_byte();
    test_full_disk();
    test_older_file();
    return test_end("test_safetensors");
}
