/* main.c - convert: a checkpoint of either trainer as a folder that transformers opens, and such a
   folder as a checkpoint. Twins: README.md, export.c, import.c, and modeling_nsa.py, which computes
   there what model/ computes here. */
#include <stdio.h>
#include <string.h>

#include "base/files.h"
#include "export.h"
#include "import.h"

enum { ARGUMENTS = 256 };

static const char usage[] =
    "convert export CHECKPOINT FOLDER [--tokenizer-path DIR]\n"
    "convert import FOLDER OUT_DIR [SETTING...]\n\n"
    "export makes FOLDER, which transformers opens: AutoModelForCausalLM.from_pretrained(FOLDER,\n"
    "trust_remote_code=True). CHECKPOINT is a checkpoint's folder, or a run's out_dir, of which "
    "the\n"
    "newest is taken. A tokenizer goes along: the bytes, or what is found in data.tokenizer_path "
    "of\n"
    "the checkpoint, or in --tokenizer-path.\n\n"
    "import makes of FOLDER's tensors a checkpoint at step 0 in OUT_DIR, for generate, inspect, "
    "and\n"
    "--init-from of the trainers. The model's settings are those of FOLDER/config.json (Llama's\n"
    "shape); where there is none, or it says less, those of the trainers: --config FILE, --dim "
    "768\n"
    "(train_tiny --help lists them).\n";

/* ---- Export -------------------------------------------------------------------------------- */

/* 2: what was asked for cannot be done; 1: it could not be written. */
static int convert_out(int argc, char **argv, fault *f) {
    checkpoint k;
    listener notes = listener_stderr();
    bool named = argc == 6 && !strcmp(argv[4], "--tokenizer-path");
    if (argc != 4 && !named) {
        fault_set(f, "convert export CHECKPOINT FOLDER [--tokenizer-path DIR]: two folders, and "
                     "that option alone");
        return 2;
    }
    if (!checkpoint_open(&k, argv[2], f)) return 2;
    int code = 0;
    if (named && !config_put(&k.config, "data.tokenizer_path", argv[5], f))
        code = 2;
    else if (!export_check(&k.config, f))
        code = 2;
    else if (!export_folder(&k, argv[3], &notes, f))
        code = 1;
    else
        printf("wrote %s from %s, step %lld\n", argv[3], k.path, (long long)k.state.step);
    checkpoint_close(&k);
    return code;
}

/* ---- Import -------------------------------------------------------------------------------- */

/* config.json's settings, then those of the command line, as one command line of a trainer. */
static bool load_settings(config *c, import_flags *flags, int argc, char **argv, fault *f) {
    static const config_program program = {.name = "convert", .summary = "", .no_effect = NULL};
    static char synthetic[] = "--dataset", kind[] = "synthetic";
    char *words[ARGUMENTS] = {argv[0], synthetic, kind};
    int count = 3;
    listener notes = listener_stderr();
    for (int i = 0; i < flags->count; i++) words[count++] = flags->text[i];
    for (int i = 4; i < argc; i++) {
        if (count == ARGUMENTS - 1) return fault_set(f, "more than %d words", ARGUMENTS - 1);
        words[count++] = argv[i];
    }
    words[count] = NULL;
    return config_load(c, &program, count, words, &notes, f) == CONFIG_OK;
}

static int convert_in(int argc, char **argv, fault *f) {
    static config c;
    static import_flags flags;
    listener notes = listener_stderr();
    if (argc < 4 || argv[2][0] == '-' || argv[3][0] == '-') {
        fault_set(f, "convert import FOLDER OUT_DIR [SETTING...]: the two folders come first");
        return 2;
    }
    if (checkpoint_exists(argv[3])) {
        fault_set(f, "%s: there is a checkpoint already; must be a new folder", argv[3]);
        return 2;
    }
    if ((import_has_settings(argv[2]) && !import_settings(&flags, argv[2], f)) ||
        !load_settings(&c, &flags, argc, argv, f))
        return 2;
    if (!import_tokenizer(&c, argv[2], argv[3], &notes, f) ||
        !import_model(&c, argv[2], argv[3], f))
        return 1;
    printf("wrote %s/checkpoints/step_00000000 from %s\n", argv[3], argv[2]);
    return 0;
}

int main(int argc, char **argv) {
    files_claim_standard();
    fault f;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return fputs(usage, stdout) < 0;
    int code = 2;
    if (argc > 1 && !strcmp(argv[1], "export"))
        code = convert_out(argc, argv, &f);
    else if (argc > 1 && !strcmp(argv[1], "import"))
        code = convert_in(argc, argv, &f);
    else
        fault_set(&f, "%.100s: must be export or import (--help says how to call this)",
                  argc > 1 ? argv[1] : "what?");
    if (!code && !files_end_output(&f)) code = 1;
    if (code) fprintf(stderr, "convert: %s\n", f.text);
    return code;
}
