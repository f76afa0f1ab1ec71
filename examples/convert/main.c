/* main.c - convert: a checkpoint of either trainer as a folder that transformers opens. Twins:
   README.md, export.c, and modeling_nsa.py, which computes there what model/ computes here. */
#include <stdio.h>
#include <string.h>

#include "base/files.h"
#include "export.h"

static const char usage[] =
    "convert export CHECKPOINT FOLDER [--tokenizer-path DIR]\n\n"
    "Makes FOLDER, which transformers opens: AutoModelForCausalLM.from_pretrained(FOLDER,\n"
    "trust_remote_code=True). CHECKPOINT is a checkpoint's folder, or a run's out_dir, of which "
    "the\n"
    "newest is taken. A tokenizer goes along: the bytes, or what is found in data.tokenizer_path "
    "of\n"
    "the checkpoint, or in --tokenizer-path.\n";

typedef struct options {
    const char *verb, *from, *to, *tokenizer;
} options;

static bool read_word(options *o, const char *word, fault *f) {
    const char **places[] = {&o->verb, &o->from, &o->to};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        if (*places[i]) continue;
        *places[i] = word;
        return true;
    }
    return fault_set(f, "%.200s: after %.200s nothing more is expected (--help says what is)", word,
                     o->to);
}

static bool read_options(options *o, int argc, char **argv, fault *f) {
    memset(o, 0, sizeof *o);
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (!strcmp(word, "--tokenizer-path")) {
            if (!argv[i + 1]) return fault_set(f, "%s: its value is missing", word);
            o->tokenizer = argv[++i];
        } else if (word[0] == '-') {
            return fault_set(f, "%.100s: unknown option (--help lists all)", word);
        } else if (!read_word(o, word, f)) {
            return false;
        }
    }
    if (!o->verb || strcmp(o->verb, "export"))
        return fault_set(f, "%.100s: must be export (--help says how to call this)",
                         o->verb ? o->verb : "what?");
    return o->to || fault_set(f, "convert export CHECKPOINT FOLDER: one of the two is missing");
}

/* 2: what was asked for cannot be done; 1: it could not be written. */
static int convert_out(const options *o, fault *f) {
    checkpoint k;
    listener notes = listener_stderr();
    if (!checkpoint_open(&k, o->from, f)) return 2;
    int code = 0;
    if (o->tokenizer && !config_put(&k.config, "data.tokenizer_path", o->tokenizer, f))
        code = 2;
    else if (!export_check(&k.config, f))
        code = 2;
    else if (!export_folder(&k, o->to, &notes, f))
        code = 1;
    else
        printf("wrote %s from %s, step %lld\n", o->to, k.path, (long long)k.state.step);
    checkpoint_close(&k);
    return code;
}

int main(int argc, char **argv) {
    files_claim_standard();
    options o;
    fault f;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return fputs(usage, stdout) < 0;
    int code = read_options(&o, argc, argv, &f) ? convert_out(&o, &f) : 2;
    if (!code && !files_end_output(&f)) code = 1;
    if (code) fprintf(stderr, "convert: %s\n", f.text);
    return code;
}
