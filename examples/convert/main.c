/* main.c - convert: a checkpoint of either trainer as a folder that transformers opens, and such a
   folder as a checkpoint. Twins: README.md, export.c, import.c, and modeling_nsa.py, which computes
   there what model/ computes here. */
#include <stdio.h>
#include <string.h>

#include "base/files.h"
#include "base/text.h"
#include "export.h"
#include "import.h"

/* ---- Export -------------------------------------------------------------------------------- */

typedef struct export_options {
    const char *tokenizer;
} export_options;

static option_outcome read_export(int argc, char **argv, export_options *o, const char **words,
                                  fault *f) {
    static const option own[] = {
        {.flag = "--tokenizer-path",
         .kind = OPTION_TEXT,
         .offset = offsetof(export_options, tokenizer),
         .words = "DIR",
         .help = "where the tokenizer is; default: data.tokenizer_path of the checkpoint"},
    };
    static const option_command command = {
        .name = "convert export",
        .summary =
            "a checkpoint as a folder that transformers opens.\n\n"
            "AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) is it. "
            "CHECKPOINT is a\ncheckpoint's folder, or a run's out_dir, of which the newest "
            "is taken. A tokenizer goes along: the\nbytes, or what is found in the folder of "
            "--tokenizer-path.",
        .words = "CHECKPOINT FOLDER",
        .rows = own,
        .count = 1,
    };
    return option_read(&command, argc, argv, o, words, f);
}

static int convert_out(int argc, char **argv, fault *f) {
    checkpoint k;
    listener notes = listener_stderr();
    export_options o = {NULL};
    const char *words[3];
    option_outcome outcome = read_export(argc, argv, &o, words, f);
    if (outcome != OPTION_OK) return outcome == OPTION_HELP ? 0 : 2;
    if (!checkpoint_open(&k, words[0], f)) return 2;
    int code = 0;
    if (o.tokenizer && k.config.data.tokenizer == CONFIG_BYTE) {
        fault_set(f, "--tokenizer-path: has no effect: the tokens of %s are bytes", words[0]);
        code = 2;
    } else if (o.tokenizer && !config_put(&k.config, "data.tokenizer_path", o.tokenizer, f)) {
        code = 2;
    } else if (!export_check(&k.config, f)) {
        code = 2;
    } else if (export_folder(&k, words[1], &notes, &code, f)) {
        code = 0;
        text_print_line(stdout, "wrote %s from %s, step %lld", words[1], k.path,
                        (long long)k.state.step);
    }
    checkpoint_close(&k);
    return code;
}

/* ---- Import -------------------------------------------------------------------------------- */

/* Where the import's tokenizer is, and where a checkpoint without a path to one looks for it. */
static bool tokenizer_place(char path[CONFIG_PATH_BYTES], const char *out_dir, fault *f) {
    return files_join(path, CONFIG_PATH_BYTES, out_dir, "tokenizer", f);
}

/* config.json's settings, and that a model is all that is wanted. */
static const char *const *settings_of(const char *const *words, const char **name, fault *f) {
    static import_flags flags;
    static const char *all[IMPORT_FLAGS + 2] = {"--dataset=synthetic"};
    static char path[CONFIG_PATH_BYTES + 16];
    char tokens[CONFIG_PATH_BYTES];
    *name = path;
    snprintf(path, sizeof path, "%.1000s/config.json", words[0]);
    if (checkpoint_exists(words[1])) {
        fault_set(f, "%s: there is a checkpoint already; must be a new folder", words[1]);
        return NULL;
    }
    if (!tokenizer_place(tokens, words[1], f)) return NULL;
    if (files_exist(tokens)) {
        fault_set(f, "%s: is there already, for another model; OUT_DIR must be a new folder",
                  tokens);
        return NULL;
    }
    if (import_has_settings(words[0]) && !import_settings(&flags, words[0], f)) return NULL;
    for (int i = 0; i < flags.count; i++) all[1 + i] = flags.text[i];
    return all;
}

/* What was typed is of a model, its tokenizer, its context, or what generate draws by. */
static bool check_given(const config *c, fault *f) {
    static const char *const taken[] = {"config",         "model.",        "nsa.",
                                        "data.tokenizer", "train.seq_len", "train.seed"};
    const char *idle = NULL, *key;
    for (size_t i = 0; (key = config_key(i)) && !idle; i++) {
        bool has_effect = config_from(c, key) != CONFIG_FROM_COMMAND_LINE;
        for (size_t k = 0; k < sizeof taken / sizeof *taken; k++)
            has_effect |= !strncmp(key, taken[k], strlen(taken[k]));
        if (!has_effect) idle = config_option(key).flag;
    }
    return !idle || fault_set(f,
                              "%s: has no effect: an import takes what is said of a model and its "
                              "tokenizer",
                              idle);
}

static int convert_in(int argc, char **argv, fault *f) {
    static const char *words[3];
    static const config_program program = {
        .name = "convert import",
        .summary =
            "a folder that transformers opens as a checkpoint at step 0.\n\nOUT_DIR is for "
            "generate, inspect, and --init-from of the trainers. The model's settings are those\n"
            "of FOLDER/config.json (Llama's shape); where there is none, or it says less, those of "
            "the trainers.",
        .words = "FOLDER OUT_DIR",
        .given = words,
        .preset = settings_of,
    };
    static config c;
    listener notes = listener_stderr();
    option_outcome outcome = config_load(&c, &program, argc, argv, &notes, f);
    if (outcome != OPTION_OK) return outcome == OPTION_HELP ? 0 : 2;
    char made[CONFIG_PATH_BYTES];
    int code;
    fault unused;
    if (!check_given(&c, f)) return 2;
    if (!import_tokenizer(&c, words[0], words[1], &notes, &code, f)) return code;
    if (!import_model(&c, words[0], words[1], &code, f)) {
        if (tokenizer_place(made, words[1], &unused) && !strcmp(c.data.tokenizer_path, made))
            files_remove_folder(made, &unused);
        return code;
    }
    text_print_line(stdout, "wrote %s/checkpoints/step_00000000 from %s", words[1], words[0]);
    return 0;
}

/* The first word says what is done; what follows is that one's command line. */
int main(int argc, char **argv) {
    static const option_command command = {
        .name = "convert",
        .summary =
            "checkpoints of the trainers and folders of transformers.\n\n"
            "convert export CHECKPOINT FOLDER makes the latter, convert import FOLDER OUT_DIR "
            "the former;\nconvert export --help and convert import --help say more.",
        .words = "export|import",
    };
    files_claim_standard();
    fault f;
    const char *words[2];
    int code = 2;
    if (argc > 1 && !strcmp(argv[1], "export"))
        code = convert_out(argc - 1, argv + 1, &f);
    else if (argc > 1 && !strcmp(argv[1], "import"))
        code = convert_in(argc - 1, argv + 1, &f);
    else if (argc > 1 && argv[1][0] != '-')
        fault_set(&f, "%.100s: must be export or import (--help says more)", argv[1]);
    else if (option_read(&command, argc, argv, NULL, words, &f) == OPTION_HELP)
        code = 0;
    if (!code && !files_end_output(&f)) code = 1;
    if (code) fprintf(stderr, "convert: %s\n", f.text);
    return code;
}
