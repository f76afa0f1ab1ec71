/* fuzz_import.c - the config.json of a model that somebody made, and the settings that `convert
   import` makes of it. Twin: examples/convert/import_settings.c. Not here: tensors
   (fuzz_safetensors.c), tokenizers (fuzz_tokenizer.c).

   import_json, which reads a file of a folder, is the harness's: it gives the input. */
#include "fuzz.h"

#include <jansson.h>
#include <string.h>

#include "../../examples/convert/import.h"
#include "base/json_file.h"
#include "config/config.h"

static const char *text;
static size_t length;

json_t *import_json(const char *folder, const char *name, const json_limit *limit, fault *f) {
    (void)folder;
    if (strcmp(name, "config.json")) {
        fault_set(f, "%s: cannot open", name);
        return NULL;
    }
    json_t *root = json_file_parse(name, text, length, limit, JSON_REJECT_DUPLICATES, f);
    if (!root || json_is_object(root)) return root;
    json_decref(root);
    fault_set(f, "%s: must be a JSON object", name);
    return NULL;
}

/* What is said of a file is one line that names it, and steers no terminal. */
static void check_message(const fault *why) {
    FUZZ_ASSERT(why->text[0] && !strpbrk(why->text, "\n\033"), "message: %s", why->text);
}

static void say_nothing(void *user, const char *line) {
    (void)user, (void)line;
}

/* As convert's command line takes them. */
static void load(import_flags *flags) {
    static const config_program program = {.name = "convert import", .summary = ""};
    static config c;
    static char first[] = "convert", set[] = "--dataset=synthetic";
    char *argv[IMPORT_FLAGS + 3] = {first, set};
    listener notes = {say_nothing, NULL};
    fault why;
    FUZZ_ASSERT(flags->count <= IMPORT_FLAGS, "%d flags", flags->count);
    for (int i = 0; i < flags->count; i++) {
        FUZZ_ASSERT(memchr(flags->text[i], 0, IMPORT_TEXT), "flag %d has no end", i);
        FUZZ_ASSERT(!strncmp(flags->text[i], "--", 2), "flag %s", flags->text[i]);
        argv[2 + i] = flags->text[i];
    }
    option_outcome outcome = config_load(&c, &program, 2 + flags->count, argv, &notes, &why);
    if (outcome != OPTION_OK) {
        FUZZ_ASSERT(outcome == OPTION_ERROR, "outcome %d", (int)outcome);
        check_message(&why);
        return;
    }
    FUZZ_ASSERT(c.model.n_heads >= 1 && c.model.n_heads % c.model.n_kv_groups == 0, "heads");
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static import_flags flags;
    fault why;
    text = (const char *)input;
    length = size;
    if (import_settings(&flags, "folder", &why))
        load(&flags);
    else
        check_message(&why);
    return 0;
}
