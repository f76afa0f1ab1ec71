/* options.c - generate's command line. Twin: options.h. */
#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Settings of the trainers that mean something here, and what they mean where that is not the
   same. */
static const struct {
    const char *flag, *key, *help;
} settings[] = {
    {"--prompt", "sample.prompt", "what the text goes on from"},
    {"--length", "sample.length", "tokens to write; default 200, or what the context has room for"},
    {"--temperature", "sample.temperature", NULL},
    {"--top-k", "sample.top_k", NULL},
    {"--top-p", "sample.top_p", NULL},
    {"--repetition-penalty", "sample.repetition_penalty", NULL},
    {"--repetition-window", "sample.repetition_window", NULL},
    {"--seed", "train.seed", "of the draws; default: that of the training"},
    {"--threads", "runtime.threads", NULL},
    {"--tokenizer-path", "data.tokenizer_path", NULL},
    {"--rope-scaling", "model.rope_scaling", NULL},
    {"--rope-factor", "model.rope_factor", NULL},
    {"--rope-trained-context", "model.rope_trained_context", NULL},
};

enum { SETTINGS = sizeof settings / sizeof settings[0], LONGEST = 1 << 24 };

static void print_help(void) {
    static const struct {
        const char *flag, *help;
    } own[] = {
        {"--prompt-file FILE", "the prompt from a file; - reads standard input"},
        {"--context N", "tokens of prompt and text together; default: train.seq_len of the"
                        " checkpoint,\n                             times --rope-factor"},
        {"--chunk N", "tokens of the prompt at a time; default 256"},
        {"--bench", "no text: tokens per second and keys read at growing lengths"},
        {"--help", "this"},
    };
    char allowed[256];
    printf("generate CHECKPOINT [OPTION]...\n\nText from a checkpoint of train_tiny or train_125m: "
           "the folder of a checkpoint, or a run's\nout_dir, of which the newest is taken.\n\n");
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        printf("  %-26s %s\n", own[i].flag, own[i].help);
    for (size_t i = 0; i < SETTINGS; i++) {
        const char *help = config_describe(settings[i].key, allowed, sizeof allowed);
        printf("  %-26s %s\n%29s%s\n", settings[i].flag, settings[i].help ? settings[i].help : help,
               "", allowed + strlen("must be "));
    }
}

static bool read_count(const char *flag, const char *text, long *to, fault *f) {
    char *end;
    errno = 0;
    *to = strtol(text, &end, 10);
    if (end != text && !*end && !errno && *to >= 1 && *to <= LONGEST) return true;
    return fault_set(f, "%s %.100s: must be an integer in 1 .. %d", flag, text, LONGEST);
}

/* `value` is NULL at the end of the command line. */
static bool read_setting(config *c, size_t i, const char *value, fault *f) {
    fault reason;
    if (!c || config_put(c, settings[i].key, value, &reason)) return true;
    return fault_set(f, "%s %.200s: %.256s", settings[i].flag, value, reason.text);
}

static bool read_flag(options *o, config *c, const char *flag, const char *value, fault *f) {
    if (!value) return fault_set(f, "%.100s: its value is missing (--help lists all)", flag);
    if (!strcmp(flag, "--chunk")) return read_count(flag, value, &o->chunk, f);
    if (!strcmp(flag, "--context")) return read_count(flag, value, &o->context, f);
    for (size_t i = 0; i < SETTINGS; i++)
        if (!strcmp(flag, settings[i].flag)) return read_setting(c, i, value, f);
    o->prompt_file = value; /* known_flag knows no other */
    return true;
}

static bool known_flag(const char *flag) {
    static const char *const own[] = {"--chunk", "--context", "--prompt-file"};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        if (!strcmp(flag, own[i])) return true;
    for (size_t i = 0; i < SETTINGS; i++)
        if (!strcmp(flag, settings[i].flag)) return true;
    return false;
}

config_outcome options_read(options *o, config *c, int argc, char **argv, fault *f) {
    *o = (options){.chunk = 256};
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (!strcmp(word, "--help") || !strcmp(word, "-h")) {
            print_help();
            return CONFIG_HELP;
        }
        if (!strcmp(word, "--bench")) {
            o->bench = true;
        } else if (word[0] == '-' && word[1]) {
            if (!known_flag(word)) fault_set(f, "%.100s: unknown option (--help lists all)", word);
            if (!known_flag(word) || !read_flag(o, c, word, i + 1 < argc ? argv[++i] : NULL, f))
                return CONFIG_ERROR;
        } else if (o->checkpoint) {
            fault_set(f, "%.200s: one checkpoint at a time, after %.200s", word, o->checkpoint);
            return CONFIG_ERROR;
        } else {
            o->checkpoint = word;
        }
    }
    if (o->checkpoint) return CONFIG_OK;
    fault_set(f, "which checkpoint? generate CHECKPOINT [OPTION]... (--help lists all)");
    return CONFIG_ERROR;
}
