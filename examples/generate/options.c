/* options.c - generate's command line. Twin: options.h. */
#include "options.h"

#include <string.h>

enum { LONGEST = 1 << 24, OWN = 6 };

/* Settings of the trainers that mean something here; `help` and `initial` where they are not the
   same. Those whose help tells the default are the checkpoint's. */
static const struct {
    const char *flag, *key, *help;
} shared[] = {
    {"--prompt", "sample.prompt", "what the text goes on from"},
    {"--length", "sample.length", "tokens to write; default 200, or what the context has room for"},
    {"--temperature", "sample.temperature", NULL},
    {"--top-k", "sample.top_k", NULL},
    {"--top-p", "sample.top_p", NULL},
    {"--min-p", "sample.min_p", NULL},
    {"--repetition-penalty", "sample.repetition_penalty", NULL},
    {"--repetition-window", "sample.repetition_window", NULL},
    {"--seed", "train.seed", "of the draws; default: that of the training"},
    {"--threads", "runtime.threads", NULL},
    {"--tokenizer-path", "data.tokenizer_path",
     "the folder of the tokenizer; default: the checkpoint's"},
    {"--rope-scaling", "model.rope_scaling",
     "how RoPE stretches past the context trained with; default: the checkpoint's"},
    {"--rope-factor", "model.rope_factor",
     "context now over context trained with; default: the checkpoint's"},
    {"--rope-trained-context", "model.rope_trained_context",
     "tokens trained with; needed by yarn and llama3; default: the checkpoint's"},
};

enum { SHARED = sizeof shared / sizeof shared[0] };

static const option own[OWN] = {
    {.flag = "--prompt-file",
     .kind = OPTION_TEXT,
     .offset = offsetof(options, prompt_file),
     .words = "FILE",
     .help = "the prompt from a file; - reads standard input"},
    {.flag = "--context",
     .kind = OPTION_INTEGER,
     .offset = offsetof(options, context),
     .min = 1,
     .max = LONGEST,
     .help = "tokens of prompt and text together; default: train.seq_len of the checkpoint,\n"
             "times --rope-factor"},
    {.flag = "--chunk",
     .kind = OPTION_INTEGER,
     .offset = offsetof(options, chunk),
     .min = 1,
     .max = LONGEST,
     .initial = "256",
     .help = "tokens of the prompt at a time"},
    {.flag = "--stop",
     .kind = OPTION_LIST,
     .offset = offsetof(options, stops),
     .words = "TEXT",
     .help = "end before this text; may be given several times"},
    {.flag = "--ignore-eos",
     .kind = OPTION_SWITCH,
     .offset = offsetof(options, ignore_end),
     .help = "go on where the model ends its text; bytes have no such token"},
    {.flag = "--bench",
     .kind = OPTION_SWITCH,
     .offset = offsetof(options, bench),
     .help = "no text: tokens per second and keys read at growing lengths"},
};

/* The trainers' rows, with the names of this program. */
static size_t table(option *rows) {
    memcpy(rows, own, sizeof own);
    for (size_t i = 0; i < SHARED; i++) {
        option o = config_option(shared[i].key);
        o.flag = shared[i].flag;
        o.key = o.environment = NULL;
        if (shared[i].help) {
            o.help = shared[i].help;
            if (strstr(o.help, "default")) o.initial = NULL;
        }
        rows[OWN + i] = o;
    }
    return OWN + SHARED;
}

static bool take(void *to, const option *row, const char *flag, const char *value, fault *f) {
    options *o = to;
    for (size_t i = 0; i < SHARED; i++)
        if (!strcmp(row->flag, shared[i].flag))
            return config_give(&o->settings, shared[i].key, flag, value, f);
    return option_set(o, row, value, f);
}

/* The flag of a setting that was given, and that asks for a text; NULL: none was. */
static const char *given_of_text(const config *c) {
    for (size_t i = 0; i < SHARED; i++) {
        bool of_text =
            !strncmp(shared[i].key, "sample.", 7) || !strcmp(shared[i].key, "train.seed");
        if (of_text && strcmp(shared[i].key, "sample.prompt") &&
            config_from(c, shared[i].key) == CONFIG_FROM_COMMAND_LINE)
            return shared[i].flag;
    }
    return NULL;
}

/* What does nothing beside the rest. */
static bool check_effects(const options *o, fault *f) {
    const char *of_text = given_of_text(&o->settings);
    if (o->bench && of_text) return fault_set(f, "%s: has no effect with --bench", of_text);
    if (o->prompt_file && o->settings.sample.prompt[0])
        return fault_set(f, "--prompt: has no effect with --prompt-file");
    if (o->bench && (o->stops.count || o->ignore_end))
        return fault_set(f, "--%s: has no effect with --bench",
                         o->stops.count ? "stop" : "ignore-eos");
    for (int i = 0; i < o->stops.count; i++)
        if (!o->stops.at[i][0]) return fault_set(f, "--stop: must be text, and not empty");
    return true;
}

option_outcome options_read(options *o, int argc, char **argv, fault *f) {
    option rows[OWN + SHARED];
    const char *words[2];
    const listener notes = listener_stderr();
    option_command command = {
        .name = "generate",
        .summary = "text from a checkpoint of train_tiny or train_125m.\n\nCHECKPOINT is the "
                   "folder of a checkpoint, or a run's out_dir, of which the newest is taken.",
        .words = "CHECKPOINT",
        .rows = rows,
        .count = table(rows),
        .hears = &notes,
    };
    memset(o, 0, sizeof *o);
    option_defaults(own, OWN, o);
    option_outcome outcome = option_parse(&command, argc, argv, take, o, words, f);
    if (outcome != OPTION_OK) return outcome;
    o->checkpoint = words[0];
    return check_effects(o, f) ? OPTION_OK : OPTION_ERROR;
}
