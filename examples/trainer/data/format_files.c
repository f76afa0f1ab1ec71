/* format_files.c - the files of a folder, each judged on its own: which are data, which are passed
   over, which are kept for validation. Twin: format.h. */
#include "data/format.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "base/files.h"
#include "config/config.h"

/* ---- Names ---- */

static bool is_among(const char *const *list, const char *word, size_t length) {
    for (; *list; list++)
        if (strlen(*list) == length && !strncasecmp(*list, word, length)) return true;
    return false;
}

/* What goes with data sets and is none of the data: README.md, LICENSE, LICENSE-MIT, sums of files,
   what was not fetched whole, what an editor left. */
static bool goes_with_data(const char *path) {
    static const char *const stems[] = {"README", "LICENSE", "LICENCE",  "COPYING",
                                        "NOTICE", "AUTHORS", "CITATION", NULL};
    static const char *const endings[] = {"", "md", "txt", "rst", "html", "cff", "bib", NULL};
    static const char *const sums[] = {"md5",  "sha1", "sha256", "sha512",
                                       "lock", "part", "tmp",    NULL};
    static const char *const whole[] = {
        "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "SHA256SUMS", "MD5SUMS",
        "_SUCCESS",          "Thumbs.db",          "desktop.ini",       NULL};
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    const char *dot = strrchr(name, '.'), *ending = dot ? dot + 1 : "";
    if (is_among(whole, name, strlen(name))) return true;
    if (is_among(sums, ending, strlen(ending)) || name[strlen(name) - 1] == '~') return true;
    return is_among(stems, name, strcspn(name, "._-")) && is_among(endings, ending, strlen(ending));
}

static const char *const train_words[] = {"train", "training", NULL};
static const char *const test_words[] = {"test", NULL};
static const char *const val_words[] = {"val", "valid", "validation", "dev", "eval", NULL};

/* What a path says of the use of its file, by words between characters that are no letters. */
typedef struct name_words {
    bool train, validate, test;
    uint64_t rest; /* a sum of the path without these words and without digits */
} name_words;

static name_words words_of(const char *path) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    name_words w = {.rest = 0};
    for (const char *at = path; *at;) {
        size_t length = strspn(at, letters), digits = strspn(at, "0123456789");
        bool train = length && is_among(train_words, at, length);
        bool validate = length && is_among(val_words, at, length);
        bool test = length && is_among(test_words, at, length);
        w.train |= train;
        w.validate |= validate;
        w.test |= test;
        size_t step = length ? length : digits ? digits : 1;
        if (train || validate || test)
            w.rest = XXH64("*", 1, w.rest);
        else if (!digits)
            w.rest = XXH64(at, step, w.rest);
        at += step;
    }
    return w;
}

/* ---- One line for all that is passed over ---- */

typedef struct notice {
    char text[600];
    size_t used, count;
} notice;

static void notice_add(notice *n, const char *name, const char *why) {
    enum { NAMED = 8 };
    if (n->count++ >= NAMED) return;
    int more = snprintf(n->text + n->used, sizeof n->text - n->used, "%s%.60s%s",
                        n->used ? ", " : "", name, why);
    n->used += more > 0 ? (size_t)more : 0;
}

static void notice_add_kind(notice *n, const char *name, const char *what) {
    char why[64];
    snprintf(why, sizeof why, " (%.60s)", what);
    notice_add(n, name, why);
}

static void notice_say(const notice *n, const char *path, const char *what, const listener *notes) {
    enum { NAMED = 8 };
    char more[48] = "";
    if (!n->count) return;
    if (n->count > NAMED) snprintf(more, sizeof more, " and %zu more", n->count - NAMED);
    listener_say(notes, "%.250s: %s: %s%s", path, what, n->text, more);
}

/* ---- The list ---- */

static bool add(format_files *to, const char *folder, const char *name, const file_format *is,
                fault *f) {
    struct stat s;
    size_t room = strlen(folder) + strlen(name) + 2;
    format_file file = {.path = malloc(room), .format = *is};
    if (!file.path) return fault_set(f, "out of memory");
    if (!files_join(file.path, room, folder, name, f)) {
        free(file.path);
        return false;
    }
    file.name = file.path + strlen(file.path) - strlen(name);
    file.size = stat(file.path, &s) ? 0 : (int64_t)s.st_size;
    to->files[to->count++] = file;
    return true;
}

static format_wish wish_of(int64_t dataset) {
    if (dataset == CONFIG_FINEWEB || dataset == CONFIG_FINEWEB_LOCAL) return FORMAT_RECORDS;
    return dataset == CONFIG_TEXT ? FORMAT_BYTES : FORMAT_BY_CONTENT;
}

static bool is_bin(const char *name) {
    size_t length = strlen(name);
    return length > 4 && !strcmp(name + length - 4, ".bin");
}

/* Judges the files of a folder; those that are no data go to `passed`. */
static bool add_folder(format_files *to, const char *folder, int64_t dataset, notice *passed,
                       fault *f) {
    char path[4096];
    files_list list;
    if (!files_list_open(&list, folder, f)) return false;
    bool ok = true;
    to->files = calloc(list.count + 1, sizeof *to->files);
    if (!to->files) ok = fault_set(f, "out of memory");
    for (size_t i = 0; ok && i < list.count; i++) {
        file_format is = {.no_data = NULL};
        const char *name = list.names[i];
        bool other = dataset == CONFIG_BIN && !is_bin(name);
        if (goes_with_data(name) || other) {
            notice_add(passed, name, "");
            continue;
        }
        ok = files_join(path, sizeof path, folder, name, f) &&
             (format_of(&is, path, wish_of(dataset), f) || is.no_data);
        if (ok && is.no_data)
            notice_add_kind(passed, name, is.no_data);
        else if (ok && is.is_empty)
            notice_add(passed, name, " (empty)");
        else if (ok)
            ok = add(to, folder, name, &is, f);
    }
    for (size_t i = 0; ok && i < list.passed_count; i++) notice_add(passed, list.passed[i], "");
    files_list_close(&list);
    return ok;
}

/* ---- What the files are together ---- */

static const format_file *first_of(const format_files *l, bool shard) {
    for (size_t i = 0; i < l->count; i++)
        if ((l->files[i].format.kind == FORMAT_SHARD) == shard) return &l->files[i];
    return NULL;
}

static bool check_kinds(format_files *l, const char *path, int64_t dataset, notice *passed,
                        fault *f) {
    const format_file *shard = first_of(l, true), *text = first_of(l, false);
    if (!shard) return true;
    if (dataset == CONFIG_DATASET_AUTO && text)
        return fault_set(
            f,
            "%.300s: token shards (%.200s) and text (%.200s) in one folder: data.dataset "
            "must say which, bin or text",
            path, shard->name, text->name);
    if (dataset == CONFIG_DATASET_AUTO || dataset == CONFIG_BIN) return true;
    if (!text)
        return fault_set(f, "%.700s: token shards (.bin), but data.dataset = %s; allowed: bin",
                         shard->path, dataset == CONFIG_TEXT ? "text" : "fineweb_edu");
    size_t kept = 0;
    for (size_t i = 0; i < l->count; i++) {
        if (l->files[i].format.kind != FORMAT_SHARD) {
            l->files[kept++] = l->files[i];
            continue;
        }
        notice_add(passed, l->files[i].name, "");
        free(l->files[i].path);
    }
    l->count = kept;
    return true;
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The sums of the names of files to train on, sorted; how many other files there are. */
static uint64_t *train_names(const format_files *l, size_t *count, size_t *others) {
    uint64_t *names = calloc(l->count + 1, sizeof *names);
    *count = *others = 0;
    for (size_t i = 0; names && i < l->count; i++) {
        name_words w = words_of(l->files[i].name);
        if (w.train) names[(*count)++] = w.rest;
        *others += w.train || (!w.validate && !w.test);
    }
    if (*count) qsort(names, *count, sizeof *names, by_value);
    return names;
}

/* Sets come in parts: fineweb_val_000000.bin beside fineweb_train_000001.bin, train/0.jsonl beside
   validation/0.jsonl. A file is of another part where one to train on has the same name but for
   that word and for digits; a shard also where there are other shards. (A book may be called
   test.txt.) */
static void part(format_files *l, const char *path, const listener *notes) {
    notice validation = {.used = 0}, tests = {.used = 0};
    size_t count, others, kept = 0, held = 0;
    uint64_t *names = train_names(l, &count, &others);
    format_file *last = calloc(l->count + 1, sizeof *last);
    for (size_t i = 0; names && last && i < l->count; i++) {
        format_file *file = &l->files[i];
        name_words w = words_of(file->name);
        bool other = !w.train && (w.validate || w.test) &&
                     ((file->format.kind == FORMAT_SHARD && others) ||
                      (count && bsearch(&w.rest, names, count, sizeof *names, by_value)));
        if (!other) {
            l->files[kept++] = *file;
        } else if (w.test) {
            notice_add(&tests, file->name, "");
            free(file->path);
        } else {
            notice_add(&validation, file->name, "");
            file->use = FORMAT_VALIDATE;
            last[held++] = *file;
        }
    }
    if (names && last) {
        memcpy(l->files + kept, last, held * sizeof *last);
        l->count = kept + held;
        l->validate = held;
    } /* else they stay as they are: no memory for names is none for data */
    free(names);
    free(last);
    notice_say(&validation, path, "for validation by their names, not trained on", notes);
    notice_say(&tests, path, "for tests by their names, passed over", notes);
}

bool format_files_open(format_files *to, const char *path, int64_t dataset, const listener *notes,
                       fault *f) {
    struct stat s;
    file_format is;
    notice passed = {.used = 0};
    memset(to, 0, sizeof *to);
    if (stat(path, &s))
        return fault_errno(f, "%s: cannot read the data%s", path,
                           strchr(path, '*') ? " (no pattern: give the folder)" : "");
    to->is_folder = S_ISDIR(s.st_mode);
    bool ok;
    if (to->is_folder) {
        ok = add_folder(to, path, dataset, &passed, f);
    } else { /* a file that is given by name is meant, whatever its name */
        to->files = calloc(1, sizeof *to->files);
        ok = (to->files || fault_set(f, "out of memory")) &&
             format_of(&is, path, wish_of(dataset), f) && add(to, "", path, &is, f);
    }
    ok = ok && check_kinds(to, path, dataset, &passed, f);
    if (ok) notice_say(&passed, path, "passed over", notes);
    if (ok && to->is_folder) part(to, path, notes);
    if (!ok) format_files_close(to);
    return ok;
}

void format_files_close(format_files *l) {
    for (size_t i = 0; i < l->count; i++) free(l->files[i].path);
    free(l->files);
    memset(l, 0, sizeof *l);
}
