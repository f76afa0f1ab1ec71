/* fuzz_config.c - config files and command lines. Twin: examples/trainer/config/config*.c. Not
   here: what a run does with its settings.

   The input is a command line, one argument a line, up to a zero byte, and a YAML file behind it.
   Settings that are accepted lie in their ranges, and are the same when written and read. */
#include "files.h"

#include <jansson.h>

#include "config/config.h"

static void ignore(void *user, const char *line) {
    (void)user;
    FUZZ_ASSERT(!strpbrk(line, "\n\033"), "control bytes in a note");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    enum { ARGUMENTS = 24 };
    static const config_program program = {.name = "fuzz", .summary = ""};
    static config c, copy;
    static char path[600];
    char *argv[ARGUMENTS + 3] = {"fuzz"}, *text = malloc(size + 1);
    int argc = 1;
    size_t line = 0;
    fault why;
    listener notes = {ignore, NULL};
    memcpy(text, data, size);
    text[size] = 0;
    size_t end = strlen(text);
    if (end < size) {
        snprintf(path, sizeof path, "--config=%.500s",
                 fuzz_write("config.yaml", text + end + 1, size - end - 1));
        argv[argc++] = path;
    }
    for (; line < end && argc < ARGUMENTS; line += strlen(text + line) + 1) {
        char *newline = strchr(text + line, '\n');
        if (newline) *newline = 0;
        /* Another file than ours is none of ours, and --help and --version print. */
        if (!strncmp(text + line, "--config", 8) || !strncmp(text + line, "--help", 6) ||
            !strncmp(text + line, "--version", 9) || !strcmp(text + line, "-h"))
            continue;
        argv[argc++] = text + line;
    }
    option_outcome outcome = config_load(&c, &program, argc, argv, &notes, &why);
    if (outcome == OPTION_ERROR)
        FUZZ_ASSERT(why.text[0] && !strpbrk(why.text, "\n\033"), "message: %s", why.text);
    if (outcome == OPTION_OK) {
        FUZZ_ASSERT(c.model.n_heads % c.model.n_kv_groups == 0 && c.nsa.l % c.nsa.d == 0, "rules");
        json_t *json = config_to_json(&c);
        copy = c;
        if (json) FUZZ_ASSERT(config_from_json(&copy, json, &why), "%s", why.text);
        if (json) FUZZ_ASSERT(config_same_model(&copy, &c, &why), "%s", why.text);
        json_decref(json);
    }
    free(text);
    return 0;
}
