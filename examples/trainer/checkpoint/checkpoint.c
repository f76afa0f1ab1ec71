/* checkpoint.c - see checkpoint.h. The order of events makes it safe to be killed at any moment:
   all files are on the disk before the folder gets its name, `latest` and `best` move after that,
   and old folders lose their name before they lose their files. */
#include "checkpoint/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/files.h"
#include "base/json_file.h"

/* No run counts further than COUNT_LIMIT: sums of counts and of what they are multiplied by stay
   below what an int64_t holds. */
#define COUNT_LIMIT ((int64_t)1 << 48)
enum { NAME_BYTES = 64, PATH_ROOM = CONFIG_PATH_BYTES + 256 };

/* A folder in the making, one on its way out, and one that another of its name replaces. */
static const char writing[] = ".writing-", removing[] = ".removing-", replaced[] = ".old";

/* ---- state.json ---- */

/* Older checkpoints do not have a FIELD_LATER, an integer, -1 there, or a FIELD_NEWER, a number,
   NaN there. */
typedef enum field_kind {
    FIELD_INTEGER,
    FIELD_NUMBER,
    FIELD_HEX,
    FIELD_LATER,
    FIELD_NEWER
} field_kind;

#define FIELD(name, kind) \
    { #name, kind, offsetof(checkpoint_state, name) }

static const struct {
    const char *name;
    field_kind kind;
    size_t offset;
} fields[] = {
    FIELD(step, FIELD_INTEGER),           FIELD(tokens, FIELD_INTEGER),
    FIELD(seconds, FIELD_NUMBER),         FIELD(loss_first, FIELD_NUMBER),
    FIELD(val_loss, FIELD_NEWER),         FIELD(seed, FIELD_HEX),
    FIELD(loss_scale, FIELD_NUMBER),      FIELD(scaler_good_steps, FIELD_INTEGER),
    FIELD(skipped_steps, FIELD_INTEGER),  FIELD(data.sample, FIELD_INTEGER),
    FIELD(data.epoch, FIELD_INTEGER),     FIELD(data.shard, FIELD_INTEGER),
    FIELD(data.offset, FIELD_INTEGER),    FIELD(data.document, FIELD_INTEGER),
    FIELD(data.used, FIELD_INTEGER),      FIELD(data.fingerprint, FIELD_HEX),
    FIELD(data.split_parts, FIELD_LATER), FIELD(data.split_size, FIELD_LATER),
    FIELD(vocabulary, FIELD_LATER),
};

enum { FIELDS = sizeof fields / sizeof fields[0] };

static json_t *json_hex(uint64_t x) {
    char text[24];
    snprintf(text, sizeof text, "%016" PRIx64, x);
    return json_string(text);
}

static bool parse_hex(const json_t *v, uint64_t *x) {
    const char *text = json_string_value(v);
    if (!text || strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16) return false;
    *x = strtoull(text, NULL, 16);
    return true;
}

static json_t *state_to_json(const checkpoint_state *s) {
    json_t *object = json_object();
    for (size_t i = 0; i < FIELDS; i++) {
        const char *at = (const char *)s + fields[i].offset;
        int64_t integer;
        uint64_t bits;
        double number;
        memcpy(&integer, at, sizeof integer);
        memcpy(&bits, at, sizeof bits);
        memcpy(&number, at, sizeof number);
        json_t *v = json_null(); /* JSON has no NaN */
        if (fields[i].kind == FIELD_INTEGER || fields[i].kind == FIELD_LATER)
            v = json_integer(integer);
        else if (fields[i].kind == FIELD_HEX)
            v = json_hex(bits);
        else if (isfinite(number))
            v = json_real(number);
        json_object_set_new(object, fields[i].name, v);
    }
    return object;
}

/* An integer that may be missing, or -1. */
static bool later_field(char *at, const json_t *v) {
    int64_t integer = v ? json_integer_value(v) : -1;
    memcpy(at, &integer, sizeof integer);
    return !v || (json_is_integer(v) && integer >= -1 && integer <= COUNT_LIMIT);
}

static bool state_from_json(checkpoint_state *s, const json_t *object, fault *f) {
    for (size_t i = 0; i < FIELDS; i++) {
        const json_t *v = json_object_get(object, fields[i].name);
        char *at = (char *)s + fields[i].offset;
        int64_t integer = json_integer_value(v);
        uint64_t bits = 0;
        bool newer = fields[i].kind == FIELD_NEWER;
        double number = json_is_null(v) || (newer && !v) ? (double)NAN : json_number_value(v);
        bool ok = fields[i].kind == FIELD_INTEGER
                      ? json_is_integer(v) && integer >= 0 && integer <= COUNT_LIMIT
                  : fields[i].kind == FIELD_HEX   ? parse_hex(v, &bits)
                  : fields[i].kind == FIELD_LATER ? later_field(at, v)
                                                  : json_is_number(v) || isnan(number);
        if (!ok)
            return fault_set(f, "\"state\": %s must be %s", fields[i].name,
                             fields[i].kind == FIELD_INTEGER ? "an integer in 0 .. 2^48"
                             : fields[i].kind == FIELD_LATER ? "an integer in -1 .. 2^48"
                             : fields[i].kind == FIELD_HEX   ? "16 hexadecimal digits"
                                                             : "a number");
        if (fields[i].kind == FIELD_INTEGER) memcpy(at, &integer, sizeof integer);
        if (fields[i].kind == FIELD_HEX) memcpy(at, &bits, sizeof bits);
        if (fields[i].kind == FIELD_NUMBER || newer) memcpy(at, &number, sizeof number);
    }
    return (s->loss_scale > 0 && s->loss_scale <= (double)COUNT_LIMIT) ||
           fault_set(f, "\"state\": loss_scale must be above 0, and at most 2^48");
}

/* The checksum of a JSON value is that of its one canonical text. */
static bool json_checksum(const json_t *v, uint64_t *xxh64) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    if (!text) return false;
    *xxh64 = XXH64(text, strlen(text), 0);
    free(text);
    return true;
}

static bool write_state(const char *folder, json_t *content, fault *f) {
    char path[PATH_ROOM];
    uint64_t xxh64;
    if (!files_join(path, sizeof path, folder, "state.json", f)) return false;
    json_t *root = json_checksum(content, &xxh64)
                       ? json_pack("{s:O, s:o}", "content", content, "xxh64", json_hex(xxh64))
                       : NULL;
    char *text = root ? json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) : NULL;
    bool ok =
        text ? files_replace(path, text, strlen(text), f) : fault_set(f, "%s: out of memory", path);
    free(text);
    json_decref(root);
    return ok;
}

/* ---- Writing ---- */

/* Removes what a run that was killed left behind. */
static bool sweep(const char *root, fault *f) {
    char path[PATH_ROOM];
    DIR *folder = opendir(root);
    if (!folder) return fault_errno(f, "%s: cannot open the folder", root);
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(folder));) {
        bool stale = !strncmp(e->d_name, writing, sizeof writing - 1) ||
                     !strncmp(e->d_name, removing, sizeof removing - 1);
        if (stale)
            ok = files_join(path, sizeof path, root, e->d_name, f) && files_remove_folder(path, f);
    }
    closedir(folder);
    return ok;
}

static bool write_parts(const char *folder, const checkpoint_part *parts, size_t count,
                        json_t *files, fault *f) {
    char path[PATH_ROOM], name[NAME_BYTES];
    uint64_t bytes, xxh64;
    for (size_t i = 0; i < count; i++) {
        snprintf(name, sizeof name, "%.40s.safetensors", parts[i].name);
        if (!files_join(path, sizeof path, folder, name, f) ||
            !safetensors_write(path, parts[i].tensors, parts[i].count, &bytes, &xxh64, f))
            return false;
        json_object_set_new(
            files, name,
            json_pack("{s:I, s:o}", "bytes", (json_int_t)bytes, "xxh64", json_hex(xxh64)));
    }
    return true;
}

static bool write_folder(const char *folder, const config *c, const checkpoint_state *state,
                         const checkpoint_part *parts, size_t count, fault *f) {
    json_t *files = json_object(), *settings = config_to_json(c);
    if (mkdir(folder, 0777)) {
        json_decref(files);
        json_decref(settings);
        return fault_errno(f, "%s: cannot make the folder", folder);
    }
    bool ok = settings || fault_set(f, "%s: a setting is not UTF-8 and cannot be saved", folder);
    ok = ok && write_parts(folder, parts, count, files, f);
    if (ok) {
        json_t *content =
            json_pack("{s:s, s:i, s:o, s:O, s:O}", "format", "nsa checkpoint", "version", 1,
                      "state", state_to_json(state), "config", settings, "files", files);
        ok = content ? write_state(folder, content, f) : fault_set(f, "%s: out of memory", folder);
        json_decref(content);
    }
    json_decref(files);
    json_decref(settings);
    return ok && files_sync_folder(folder, f);
}

/* Takes a checkpoint's name away before its files: what is half removed is no checkpoint. */
static bool remove_checkpoint(const char *root, const char *name, fault *f) {
    char path[PATH_ROOM], aside[PATH_ROOM], hidden[NAME_BYTES * 2];
    snprintf(hidden, sizeof hidden, "%s%s", removing, name);
    if (!files_join(path, sizeof path, root, name, f) ||
        !files_join(aside, sizeof aside, root, hidden, f) || !files_remove_folder(aside, f))
        return false;
    if (rename(path, aside) && errno != ENOENT)
        return fault_errno(f, "%s: cannot be removed", path);
    return files_remove_folder(aside, f);
}

/* Gives the folder its name. One of that name, from a run that was resumed further back, keeps a
   name that checkpoint_open understands until the new one is in place. */
static bool put_in_place(const char *root, const char *aside, const char *name, fault *f) {
    char path[PATH_ROOM], old[PATH_ROOM], old_name[NAME_BYTES * 2];
    snprintf(old_name, sizeof old_name, "%s%s", name, replaced);
    if (!files_join(path, sizeof path, root, name, f) ||
        !files_join(old, sizeof old, root, old_name, f))
        return false;
    bool again = files_exist(path);
    if (again && !remove_checkpoint(root, old_name, f)) return false;
    if (again && rename(path, old)) return fault_errno(f, "%s: cannot be moved away", path);
    if (rename(aside, path)) {
        fault_errno(f, "%s: cannot be put in place", path);
        if (again) (void)!rename(old, path); /* or else it is found as NAME.old */
        return false;
    }
    return files_sync_folder(root, f) && remove_checkpoint(root, old_name, f);
}

/* "step_00000200", or that with ".old". */
static bool parse_name(const char *name, int64_t *step) {
    size_t digits = strspn(name + (strncmp(name, "step_", 5) ? 0 : 5), "0123456789");
    if (strncmp(name, "step_", 5) || digits < 8 || digits > 18) return false;
    *step = strtoll(name + 5, NULL, 10);
    return !name[5 + digits] || !strcmp(name + 5 + digits, replaced);
}

/* Makes root/which a link to the checkpoint of that name, or a file that holds it where there are
   no links (FAT, drives of a cloud). A copy that has followed links has a folder there: it stays,
   by another name. */
static bool point(const char *root, const char *which, const char *name, fault *f) {
    char link[PATH_ROOM], aside[PATH_ROOM], left[PATH_ROOM], hidden[NAME_BYTES];
    snprintf(hidden, sizeof hidden, ".%.40s", which);
    if (!files_join(link, sizeof link, root, which, f) ||
        !files_join(aside, sizeof aside, root, hidden, f))
        return false;
    unlink(aside);
    if (symlink(name, aside) && !files_replace(aside, name, strlen(name), f)) return false;
    bool ok = !rename(aside, link);
    if (!ok && errno == EISDIR && files_spare(link, left, sizeof left, f))
        ok = !rename(link, left) && !rename(aside, link);
    if (!ok) return fault_errno(f, "%s: cannot point it at %s", link, name);
    return files_sync_folder(root, f);
}

/* The name that root/which points at; empty where it points at no checkpoint's. */
static void pointed(const char *root, const char *which, char name[NAME_BYTES]) {
    char link[PATH_ROOM] = "";
    int64_t step;
    fault unused;
    ssize_t n = files_join(link, sizeof link, root, which, &unused)
                    ? readlink(link, name, NAME_BYTES - 1)
                    : -1;
    int fd = n < 0 ? open(link, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW) : -1;
    if (fd >= 0) {
        n = read(fd, name, NAME_BYTES - 1);
        close(fd);
    }
    name[n > 0 ? n : 0] = 0;
    if (!parse_name(name, &step)) name[0] = 0;
}

/* ---- Retention ---- */

typedef struct found {
    char name[NAME_BYTES];
    int64_t step;
} found;

/* Of two of one step the one that was being replaced comes last. */
static int newest_first(const void *a, const void *b) {
    const found *x = a, *y = b;
    if (x->step != y->step) return x->step < y->step ? 1 : -1;
    return strcmp(x->name, y->name);
}

/* The checkpoints in a folder, to be freed; NULL where there are none or on a fault. */
static found *find_all(const char *root, size_t *count) {
    char path[PATH_ROOM];
    struct stat s;
    fault unused;
    found *list = NULL, one;
    DIR *folder = opendir(root);
    *count = 0;
    if (!folder) return NULL;
    for (struct dirent *e; (e = readdir(folder));) {
        if (!parse_name(e->d_name, &one.step) || strlen(e->d_name) >= NAME_BYTES) continue;
        if (!files_join(path, sizeof path, root, e->d_name, &unused)) continue;
        snprintf(one.name, sizeof one.name, "%.*s", NAME_BYTES - 1, e->d_name);
        if (stat(path, &s) || !S_ISDIR(s.st_mode)) continue;
        found *more = realloc(list, (*count + 1) * sizeof *list);
        if (!more) break;
        list = more;
        list[(*count)++] = one;
    }
    closedir(folder);
    if (list) qsort(list, *count, sizeof *list, newest_first);
    return list;
}

/* By step, for a clock can be set back. Higher steps than the current one are none of its past. */
static bool remove_old(const char *root, int64_t step, int64_t keep, int64_t every, fault *f) {
    char best[NAME_BYTES];
    size_t count;
    int64_t kept = 0;
    bool ok = true;
    if (!keep) return true;
    pointed(root, "best", best);
    found *list = find_all(root, &count);
    for (size_t i = 0; ok && i < count; i++) {
        if (list[i].step > step || kept++ < keep || !strcmp(list[i].name, best)) continue;
        if (!every || list[i].step % every) ok = remove_checkpoint(root, list[i].name, f);
    }
    free(list);
    return ok;
}

/* ---- Reading ---- */

/* Whoever reads, copies or links a file of a checkpoint takes its name from here. */
static bool check_files(json_t *files, fault *f) {
    static const char end[] = ".safetensors";
    const char *name;
    json_t *file;
    if (!json_is_object(files)) return fault_set(f, "\"files\" must be an object");
    if (!json_object_get(files, "model.safetensors"))
        return fault_set(f, "\"files\" must list model.safetensors");
    json_object_foreach(files, name, file) {
        size_t length = strlen(name);
        uint64_t unused;
        const json_t *bytes = json_object_get(file, "bytes");
        if (!files_plain_name(name) || length >= NAME_BYTES || length < sizeof end ||
            strcmp(name + length + 1 - sizeof end, end))
            return fault_set(f,
                             "\"files\": \"%.100s\" must be the name of a part, such as "
                             "model.safetensors, and lead to no other folder",
                             name);
        if (!json_is_integer(bytes) || json_integer_value(bytes) < 0 ||
            !parse_hex(json_object_get(file, "xxh64"), &unused))
            return fault_set(f, "\"files\": %s must have its bytes and its xxh64", name);
    }
    return true;
}

static bool read_content(checkpoint *k, const json_t *root, fault *f) {
    const json_t *content = json_object_get(root, "content");
    uint64_t want, have;
    if (!json_is_object(content) || !parse_hex(json_object_get(root, "xxh64"), &want))
        return fault_set(f, "not the state of a checkpoint");
    if (!json_checksum(content, &have)) return fault_set(f, "out of memory");
    if (have != want)
        return fault_set(f, "damaged: its checksum is %016" PRIx64 ", it says %016" PRIx64, have,
                         want);
    const char *format = json_string_value(json_object_get(content, "format"));
    const json_t *version = json_object_get(content, "version");
    if (!format || strcmp(format, "nsa checkpoint") || json_integer_value(version) != 1)
        return fault_set(f, "another format, or another version than 1");
    k->files = json_incref(json_object_get(content, "files"));
    return check_files(k->files, f) &&
           state_from_json(&k->state, json_object_get(content, "state"), f) &&
           config_from_json(&k->config, json_object_get(content, "config"), f);
}

static bool read_state(checkpoint *k, fault *f) {
    char path[PATH_ROOM];
    fault reason;
    if (!files_join(path, sizeof path, k->path, "state.json", f)) return false;
    json_t *root = json_file_read(path, &json_of_settings, f);
    if (!root) return false;
    bool ok = read_content(k, root, &reason) || fault_set(f, "%.400s: %.600s", path, reason.text);
    json_decref(root);
    return ok;
}

static bool has_state(const char *folder) {
    char path[PATH_ROOM];
    fault unused;
    return files_join(path, sizeof path, folder, "state.json", &unused) && files_exist(path);
}

/* Whether the state can be read and every file that it lists is as long as it says. */
static bool is_whole(const char *folder) {
    checkpoint k = {.files = NULL};
    char path[PATH_ROOM];
    const char *name;
    json_t *file;
    struct stat s;
    fault unused;
    bool ok = files_join(k.path, sizeof k.path, "", folder, &unused) && read_state(&k, &unused);
    if (ok) {
        json_object_foreach(k.files, name, file) {
            ok = ok && files_join(path, sizeof path, folder, name, &unused) && !stat(path, &s) &&
                 s.st_size == json_integer_value(json_object_get(file, "bytes"));
        }
    }
    checkpoint_close(&k);
    return ok;
}

/* The folder that root/which names. */
static bool find_pointed(const char *root, const char *which, char *path, fault *f) {
    char name[NAME_BYTES];
    pointed(root, which, name);
    return name[0] && files_join(path, CONFIG_PATH_BYTES, root, name, f) && has_state(path);
}

/* The folder that root/latest names; else the highest step that is whole; else, for its fault to be
   named, the highest that is there. */
static bool find_latest(const char *root, char *path, fault *f) {
    size_t count;
    if (find_pointed(root, "latest", path, f)) return true;
    bool any = false, whole = false;
    found *list = find_all(root, &count);
    for (size_t i = 0; !whole && i < count; i++) {
        char candidate[CONFIG_PATH_BYTES];
        if (!files_join(candidate, sizeof candidate, root, list[i].name, f) ||
            !has_state(candidate))
            continue;
        whole = is_whole(candidate);
        if (whole || !any) memcpy(path, candidate, sizeof candidate);
        any = true;
    }
    free(list);
    return any;
}

bool checkpoint_exists(const char *out_dir) {
    char root[PATH_ROOM];
    size_t count = 0;
    fault unused;
    if (files_join(root, sizeof root, out_dir, "checkpoints", &unused))
        free(find_all(root, &count));
    return count > 0;
}

/* A run that brought its tokenizer along has it beside its checkpoints, wherever the run lies by
   now: OUT_DIR/tokenizer, and no path in the settings. */
static bool find_tokenizer(checkpoint *k, fault *f) {
    static const char root[] = "checkpoints/";
    char path[PATH_ROOM];
    const char *name = strrchr(k->path, '/');
    size_t before = name ? (size_t)(name + 1 - k->path) : 0, length = sizeof root - 1;
    if (k->config.data.tokenizer != CONFIG_GPT2 || k->config.data.tokenizer_path[0]) return true;
    bool named = before >= length && !strncmp(k->path + before - length, root, length) &&
                 (before == length || k->path[before - length - 1] == '/');
    if (named)
        snprintf(path, sizeof path, "%.*stokenizer", (int)(before - length), k->path);
    else if (!files_join(path, sizeof path, k->path, "../../tokenizer", f))
        return false;
    return !files_exist(path) || config_put(&k->config, "data.tokenizer_path", path, f);
}

/* The folder that path, a file where there are no links, names. */
static bool find_named(const char *path, char *to, fault *f) {
    char root[PATH_ROOM];
    const char *which = strrchr(path, '/');
    if (!which || which - path >= PATH_ROOM) return false;
    snprintf(root, sizeof root, "%.*s", (int)(which - path), path);
    return find_pointed(root, which + 1, to, f);
}

bool checkpoint_open(checkpoint *k, const char *path, fault *f) {
    char root[PATH_ROOM];
    memset(k, 0, sizeof *k);
    if (has_state(path)) {
        if (!files_join(k->path, sizeof k->path, "", path, f)) return false;
    } else if (!files_join(root, sizeof root, path, "checkpoints", f) ||
               (!find_named(path, k->path, f) && !find_latest(root, k->path, f) &&
                !find_latest(path, k->path, f))) {
        bool foreign = files_join(root, sizeof root, path, "config.json", f) && files_exist(root);
        return fault_set(f,
                         "%s: no checkpoint: must be a folder with a state.json, or a run's "
                         "out_dir with one under checkpoints/%s",
                         path,
                         foreign ? "; of one of transformers `convert import` makes one" : "");
    }
    if (read_state(k, f) && find_tokenizer(k, f)) return true;
    checkpoint_close(k);
    return false;
}

/* The validation loss of the step of a checkpoint; NaN where it has none, or cannot be read. */
static double val_loss_of(const char *root, const char *name) {
    checkpoint k = {.files = NULL};
    fault unused;
    bool ok = files_join(k.path, sizeof k.path, root, name, &unused) && read_state(&k, &unused);
    checkpoint_close(&k);
    return ok ? k.state.val_loss : (double)NAN;
}

/* `best` is one of a lower loss than all before it, so that retention may remove those. */
static bool note_best(const char *root, const char *name, const checkpoint_state *state, fault *f) {
    char best[NAME_BYTES];
    pointed(root, "best", best);
    bool lower = !best[0] || !(val_loss_of(root, best) <= state->val_loss);
    return isnan(state->val_loss) || !lower || point(root, "best", name, f);
}

/* The best of those that are there, the earliest of equal ones; none where none has a loss. */
static bool find_best(const char *root, fault *f) {
    char link[PATH_ROOM];
    const char *best = NULL;
    double lowest = INFINITY;
    size_t count;
    if (!files_join(link, sizeof link, root, "best", f)) return false;
    found *list = find_all(root, &count);
    for (size_t i = 0; i < count; i++) {
        double loss = val_loss_of(root, list[i].name);
        if (!(loss <= lowest)) continue;
        lowest = loss;
        best = list[i].name;
    }
    bool ok = best ? point(root, "best", best, f) : !unlink(link) || errno == ENOENT;
    if (!ok && !best) fault_errno(f, "%s: cannot be removed", link);
    free(list);
    return ok;
}

/* Of a file that was cut short or goes on, the size, which takes no time, is told before the
   checksum is asked for. */
static bool check_size(const checkpoint *k, const char *name, const char *path, int fd, fault *f) {
    const json_t *file = json_object_get(k->files, name);
    json_int_t size = json_integer_value(json_object_get(file, "bytes"));
    struct stat s;
    if (fstat(fd, &s)) return fault_errno(f, "%s: cannot read", path);
    return (json_int_t)s.st_size == size ||
           fault_set(f, "%s: damaged: %lld bytes, state.json says %lld", path, (long long)s.st_size,
                     (long long)size);
}

static bool hash_file(int fd, const char *path, uint64_t *xxh64, fault *f) {
    enum { CHUNK = 1 << 20 };
    char *chunk = malloc(CHUNK);
    XXH64_state_t *hash = XXH64_createState();
    bool ok = (chunk && hash) || fault_set(f, "%s: out of memory", path);
    if (ok) XXH64_reset(hash, 0);
    while (ok) {
        ssize_t got = read(fd, chunk, CHUNK);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) ok = fault_errno(f, "%s: cannot read", path);
        if (got <= 0) break;
        XXH64_update(hash, chunk, (size_t)got);
    }
    if (ok) *xxh64 = XXH64_digest(hash);
    XXH64_freeState(hash);
    free(chunk);
    return ok;
}

static bool verify(const checkpoint *k, const char *name, const char *path, fault *f) {
    const json_t *file = json_object_get(k->files, name);
    uint64_t want, have;
    if (!parse_hex(json_object_get(file, "xxh64"), &want))
        return fault_set(f, "%s: state.json does not list %s", k->path, name);
    int fd = files_open(path, f);
    bool ok = fd >= 0 && check_size(k, name, path, fd, f) && hash_file(fd, path, &have, f);
    if (fd >= 0) close(fd);
    if (ok && have != want)
        ok =
            fault_set(f, "%s: damaged: its checksum is %016" PRIx64 ", state.json says %016" PRIx64,
                      path, have, want);
    return ok;
}

bool checkpoint_load(const checkpoint *k, const checkpoint_part *part, fault *f) {
    char path[PATH_ROOM], name[NAME_BYTES];
    snprintf(name, sizeof name, "%.40s.safetensors", part->name);
    if (!files_join(path, sizeof path, k->path, name, f) || !verify(k, name, path, f)) return false;
    safetensors_file *file = safetensors_open(path, f);
    if (!file) return false;
    bool ok = safetensors_load(file, part->tensors, part->count, f);
    safetensors_close(file);
    return ok;
}

bool checkpoint_verify(const checkpoint *k, fault *f) {
    char path[PATH_ROOM];
    const char *name;
    json_t *file;
    json_object_foreach(k->files, name, file) {
        if (!files_join(path, sizeof path, k->path, name, f) || !verify(k, name, path, f))
            return false;
    }
    return true;
}

/* ---- A whole one ---- */

bool checkpoint_write(const char *out_dir, const config *c, const checkpoint_state *state,
                      const checkpoint_part *parts, size_t count, int64_t keep, fault *f) {
    char root[PATH_ROOM], aside[PATH_ROOM], name[NAME_BYTES], hidden[NAME_BYTES * 2];
    fault unused;
    snprintf(name, sizeof name, "step_%08" PRId64, state->step);
    snprintf(hidden, sizeof hidden, "%s%s", writing, name);
    if (!files_join(root, sizeof root, out_dir, "checkpoints", f) ||
        !files_join(aside, sizeof aside, root, hidden, f) || !files_make_folder(root, f) ||
        !sweep(root, f))
        return false;
    if (!write_folder(aside, c, state, parts, count, f) || !put_in_place(root, aside, name, f)) {
        files_remove_folder(aside, &unused);
        return false;
    }
    return point(root, "latest", name, f) && note_best(root, name, state, f) &&
           remove_old(root, state->step, keep, c->train.keep_every, f);
}

/* ---- Going on from one ---- */

static bool copy_file(const checkpoint *k, const char *name, const char *from, const char *to,
                      fault *f) {
    enum { CHUNK = 1 << 20 };
    char *chunk = malloc(CHUNK);
    struct stat s;
    int in = files_open(from, f);
    bool ok = in >= 0 && check_size(k, name, from, in, f) &&
              (!fstat(in, &s) || fault_errno(f, "%s: cannot read", from));
    int out = ok ? open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, s.st_mode & 0666) : -1;
    if (ok && out < 0) ok = fault_errno(f, "%s: cannot create", to);
    if (ok && !chunk) ok = fault_set(f, "%s: out of memory", to);
    while (ok) {
        ssize_t got = read(in, chunk, CHUNK);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) ok = fault_errno(f, "%s: cannot read", from);
        if (got <= 0) break;
        ok = files_write_all(out, to, chunk, (size_t)got, f);
    }
    if (ok && fsync(out)) ok = fault_errno(f, "%s: cannot flush", to);
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    free(chunk);
    return ok;
}

/* Whether a second name for the file is as good as a copy: it is the user's own plain file, which
   nobody else writes into, and no program. */
static bool may_share(const char *path) {
    struct stat s;
    return !lstat(path, &s) && S_ISREG(s.st_mode) && s.st_uid == geteuid() &&
           !(s.st_mode & (S_ISUID | S_ISGID | S_ISVTX | S_IXUSR | S_IXGRP | S_IXOTH | S_IWOTH));
}

/* The same files under another name, or else copies that are what the state says. */
static bool take_files(const checkpoint *k, const char *folder, fault *f) {
    char from[PATH_ROOM], to[PATH_ROOM];
    const char *name;
    json_t *file;
    if (mkdir(folder, 0777)) return fault_errno(f, "%s: cannot make the folder", folder);
    json_object_foreach(k->files, name, file) {
        if (!files_join(from, sizeof from, k->path, name, f) ||
            !files_join(to, sizeof to, folder, name, f) ||
            ((!may_share(from) || link(from, to)) &&
             !(copy_file(k, name, from, to, f) && verify(k, name, to, f))))
            return false;
    }
    return true;
}

static bool take_folder(const checkpoint *k, const char *folder, const config *c, fault *f) {
    json_t *settings = config_to_json(c);
    json_t *content =
        json_pack("{s:s, s:i, s:o, s:o, s:O}", "format", "nsa checkpoint", "version", 1, "state",
                  state_to_json(&k->state), "config", settings, "files", k->files);
    bool ok = content ? take_files(k, folder, f) && write_state(folder, content, f) &&
                            files_sync_folder(folder, f)
                      : fault_set(f, "%s: out of memory", folder);
    json_decref(content);
    return ok;
}

static bool same_settings(const config *a, const config *b) {
    json_t *x = config_to_json(a), *y = config_to_json(b);
    bool same = x && y && json_equal(x, y);
    json_decref(x);
    json_decref(y);
    return same;
}

bool checkpoint_adopt(const checkpoint *k, const char *out_dir, const config *c, fault *f) {
    char root[PATH_ROOM], aside[PATH_ROOM], path[PATH_ROOM], name[NAME_BYTES];
    char hidden[NAME_BYTES * 2];
    fault unused;
    snprintf(name, sizeof name, "step_%08" PRId64, k->state.step);
    snprintf(hidden, sizeof hidden, "%s%s", writing, name);
    if (!files_join(root, sizeof root, out_dir, "checkpoints", f) ||
        !files_join(path, sizeof path, root, name, f) ||
        !files_join(aside, sizeof aside, root, hidden, f) || !files_make_folder(root, f) ||
        !sweep(root, f))
        return false;
    bool is_it = files_same(path, k->path) && same_settings(c, &k->config);
    if (!is_it && (!take_folder(k, aside, c, f) || !put_in_place(root, aside, name, f))) {
        files_remove_folder(aside, &unused);
        return false;
    }
    return point(root, "latest", name, f) && find_best(root, f);
}

static bool leave(const char *root, const char *name, const listener *notes, fault *f) {
    char path[PATH_ROOM], to[PATH_ROOM];
    if (!files_join(path, sizeof path, root, name, f) || !files_spare(path, to, sizeof to, f))
        return false;
    if (rename(path, to)) return fault_errno(f, "%s: cannot be renamed", path);
    listener_say(notes, "%s: later than where this run goes on from, now %s", path,
                 strrchr(to, '/') + 1);
    return true;
}

bool checkpoint_set_aside(const checkpoint *k, const char *out_dir, const listener *notes,
                          fault *f) {
    char root[PATH_ROOM], path[PATH_ROOM], to[PATH_ROOM], name[NAME_BYTES];
    snprintf(name, sizeof name, "step_%08" PRId64, k->state.step);
    if (!files_join(root, sizeof root, out_dir, "checkpoints", f) ||
        !files_join(path, sizeof path, root, name, f) || !files_spare(path, to, sizeof to, f))
        return false;
    if (!files_same(path, k->path)) return true;
    if (!take_folder(k, to, &k->config, f)) return false;
    listener_say(notes, "%s: replaced, and kept as %s", path, strrchr(to, '/') + 1);
    return true;
}

bool checkpoint_leave_later(const char *out_dir, int64_t step, const listener *notes, fault *f) {
    char root[PATH_ROOM];
    size_t count;
    bool ok = files_join(root, sizeof root, out_dir, "checkpoints", f);
    found *list = ok ? find_all(root, &count) : NULL;
    for (size_t i = 0; list && ok && i < count && list[i].step > step; i++)
        ok = leave(root, list[i].name, notes, f);
    free(list);
    return ok && find_best(root, f);
}

void checkpoint_close(checkpoint *k) {
    json_decref(k->files);
    k->files = NULL;
}
