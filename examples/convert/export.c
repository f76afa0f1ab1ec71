/* export.c - see export.h. */
#include "export.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "data/tokenizer.h"
#include "import.h"
#include "model/model.h"
#include "train/restore.h"
#include "train/train.h"

enum { PATH_ROOM = CONFIG_PATH_BYTES + 256, FILE_LIMIT = 1 << 28 };

static bool write_file(const char *folder, const char *name, const void *bytes, size_t count,
                       fault *f) {
    char path[PATH_ROOM];
    return files_join(path, sizeof path, folder, name, f) && files_replace(path, bytes, count, f);
}

/* `root` may be NULL, for want of memory; it is given up here. */
static bool write_json(const char *folder, const char *name, json_t *root, fault *f) {
    char *text = root ? json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(15)) : NULL;
    bool ok = text ? write_file(folder, name, text, strlen(text), f)
                   : fault_set(f, "%s/%s: out of memory", folder, name);
    free(text);
    json_decref(root);
    return ok;
}

/* ---- The model ----------------------------------------------------------------------------- */

static json_t *rope_json(const config_model *m) {
    static const char *const pairs[] = {"interleaved", "halves"};
    static const char *const scalings[] = {"none", "linear", "ntk", "yarn", "llama3"};
    return json_pack("{s:f, s:s, s:s, s:f, s:I, s:f, s:f}", "base", m->rope_base, "pairs",
                     pairs[m->rope_pairs], "scaling", scalings[m->rope_scaling], "factor",
                     m->rope_factor, "trained_context", (json_int_t)m->rope_trained_context, "fast",
                     m->rope_fast, "slow", m->rope_slow);
}

/* One kind, or that of each layer. */
static json_t *attention_json(const config_model *m) {
    json_t *list = json_array();
    bool alike = true;
    for (int64_t i = 0; i < m->n_layers; i++) {
        attention_kind kind = config_attention(m, i);
        alike = alike && kind == config_attention(m, 0);
        json_array_append_new(list, json_string(config_attention_name(kind)));
    }
    json_t *whole = alike ? json_incref(json_array_get(list, 0)) : json_incref(list);
    json_decref(list);
    return whole;
}

/* What NSAConfig of modeling_nsa.py takes. `vocab` is the tokenizer's where the settings name
   none. */
static json_t *model_json(const config *c, int64_t vocab) {
    static const char *const phis[] = {"mean", "conv", "mlp"};
    static const char *const gates[] = {"sigmoid", "softmax"};
    const config_model *m = &c->model;
    const config_nsa *n = &c->nsa;
    static const char *const mlps[] = {"silu", "swiglu"}, *const forms[] = {"mlp", "linear"};
    json_t *root = json_pack(
        "{s:[s], s:s, s:{s:s, s:s}, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:f, s:b, "
        "s:I, s:o}",
        "architectures", "NSAForCausalLM", "model_type", "nsa_decoder", "auto_map", "AutoConfig",
        "modeling_nsa.NSAConfig", "AutoModelForCausalLM", "modeling_nsa.NSAForCausalLM",
        "torch_dtype", "float32", "vocab_size", vocab, "hidden_size", m->dim, "num_hidden_layers",
        m->n_layers, "num_attention_heads", m->n_heads, "num_key_value_heads", m->n_kv_groups,
        "head_dim", m->d_k, "v_head_dim", m->d_v, "intermediate_size",
        m->mlp_hidden ? m->mlp_hidden : 4 * m->dim, "mlp", mlps[m->mlp], "rms_norm_eps",
        m->norm_eps, "tie_word_embeddings", (int)m->tied_embeddings, "max_position_embeddings",
        c->train.seq_len, "rope", rope_json(m));
    json_t *attention =
        json_pack("{s:o, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:s}", "attention",
                  attention_json(m), "shared_kv", (int)m->shared_kv, "qk_norm", (int)m->qk_norm,
                  "cmp_block", n->l, "cmp_stride", n->d, "slc_block", n->l_sel, "slc_count",
                  n->n_sel, "slc_init", n->n_init, "slc_local", n->n_local, "window", n->w, "phi",
                  phis[n->phi], "gate", gates[n->gate], "gate_form", forms[n->gate_form]);
    if (root && attention) json_object_update(root, attention);
    json_decref(attention);
    return root;
}

/* Every tensor of the checkpoint's model.safetensors, in memory; `block` holds their data. */
static bool read_tensors(safetensors_file *from, safetensors_tensor **list, char **block,
                         fault *f) {
    size_t count = safetensors_count(from), bytes = 0;
    *list = calloc(count + 1, sizeof **list);
    for (size_t i = 0; *list && i < count; i++) {
        (*list)[i] = safetensors_info(from, i);
        bytes += safetensors_tensor_bytes(&(*list)[i]);
    }
    *block = malloc(bytes + 1);
    if (!*list || !*block) return fault_set(f, "out of memory for the model's %zu tensors", count);
    for (size_t i = 0, at = 0; i < count; i++) {
        (*list)[i].data = *block + at;
        at += safetensors_tensor_bytes(&(*list)[i]);
    }
    return safetensors_load(from, *list, count, f);
}

static bool write_model(const checkpoint *k, const char *folder, int *code, fault *f) {
    char from_path[PATH_ROOM], path[PATH_ROOM];
    safetensors_tensor *list = NULL;
    char *block = NULL;
    uint64_t bytes, xxh64;
    if (!files_join(from_path, sizeof from_path, k->path, "model.safetensors", f) ||
        !files_join(path, sizeof path, folder, "model.safetensors", f))
        return false;
    safetensors_file *from = safetensors_open(from_path, f);
    if (!from) return false;
    *code = 2;
    bool ok = read_tensors(from, &list, &block, f) &&
              safetensors_check_finite(from_path, list, safetensors_count(from), f);
    if (ok) *code = 1;
    ok = ok && safetensors_write(path, list, safetensors_count(from), &bytes, &xxh64, f);
    safetensors_close(from);
    free(list);
    free(block);
    return ok;
}

static bool same_tensor(const param *p, const safetensors_tensor *t) {
    bool same = p->dims == t->dims && !strcmp(p->name, t->name);
    for (int i = 0; same && i < p->dims; i++) same = p->shape[i] == t->shape[i];
    return same;
}

/* Whether the file holds the tensors of the table, in its order, and no others. */
static bool same_tensors(const params *table, const safetensors_file *file, const char *path,
                         fault *f) {
    int count = (int)safetensors_count(file);
    for (int i = 0; i < table->length; i++) {
        if (i == count)
            return fault_set(f, "%s: no tensor for the model's %s", path, table->list[i].name);
        safetensors_tensor t = safetensors_info(file, (size_t)i);
        if (!same_tensor(&table->list[i], &t))
            return fault_set(f, "%s: tensor %.100s: by the settings it must be %s, of its shape",
                             path, t.name, table->list[i].name);
    }
    return count == table->length ||
           fault_set(f, "%s: tensor %.100s: the model has none of this name", path,
                     safetensors_info(file, (size_t)table->length).name);
}

/* The settings and the weights of a checkpoint have sums of their own, and may be of two models. */
static bool check_weights(const checkpoint *k, int32_t vocab, fault *f) {
    char path[PATH_ROOM];
    model m;
    ops o = {0};
    model_config shape = train_model_config(&k->config, vocab);
    if (!files_join(path, sizeof path, k->path, "model.safetensors", f) || !ops_cpu_open(&o, 1, f))
        return false;
    bool described = model_describe(&m, &shape, &o, f);
    safetensors_file *file = described ? safetensors_open(path, f) : NULL;
    bool ok = file && same_tensors(&m.params, file, path, f);
    if (file) safetensors_close(file);
    if (described) model_close(&m);
    ops_cpu_close(&o);
    return ok;
}

/* ---- Settings that have no counterpart ---- */

/* A setting of the model that differs from its default must be one that model_json writes. */
bool export_check(const config *c, fault *f) {
    static const char *const known[] = {"model.vocab_size",
                                        "model.dim",
                                        "model.n_layers",
                                        "model.n_heads",
                                        "model.n_kv_groups",
                                        "model.d_k",
                                        "model.d_v",
                                        "model.attention",
                                        "model.tied_embeddings",
                                        "model.rope_pairs",
                                        "model.rope_base",
                                        "model.rope_scaling",
                                        "model.rope_factor",
                                        "model.rope_trained_context",
                                        "model.rope_fast",
                                        "model.rope_slow",
                                        "nsa.l",
                                        "nsa.d",
                                        "nsa.l_sel",
                                        "nsa.n_sel",
                                        "nsa.w",
                                        "nsa.phi",
                                        "nsa.gate",
                                        "model.qk_norm",
                                        "nsa.gate_form",
                                        "nsa.n_init",
                                        "nsa.n_local",
                                        "model.shared_kv",
                                        "model.mlp",
                                        "model.mlp_hidden",
                                        "model.norm_eps"};
    static config defaults;
    json_t *none = json_object(), *changes = NULL;
    bool ok = config_from_json(&defaults, none, f);
    if (ok && !(changes = config_changes(&defaults, c))) ok = fault_set(f, "out of memory");
    const char *key;
    json_t *value;
    json_object_foreach(changes, key, value) {
        size_t i = 0, count = sizeof known / sizeof *known;
        while (i < count && strcmp(key, known[i])) i++;
        bool models = !strncmp(key, "model.", 6) || !strncmp(key, "nsa.", 4);
        if (ok && models && i == count)
            ok = fault_set(f, "%s: modeling_nsa.py has no such setting", key);
    }
    json_decref(none);
    json_decref(changes);
    return ok;
}

/* ---- The tokenizer ------------------------------------------------------------------------- */

/* The character, in UTF-8, by which byte-level vocabularies spell a byte: itself where it is
   printable in Latin-1, and the others, in order, those from 256 on. */
static void spell_byte(int byte, char text[3]) {
    int character = byte;
    bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    if (!printable) {
        character = byte <= 32 ? 256 + byte : byte == 173 ? 323 : 256 + 33 + byte - 127;
    }
    memset(text, 0, 3);
    if (character < 128) {
        text[0] = (char)character;
    } else {
        text[0] = (char)(0xc0 | character >> 6);
        text[1] = (char)(0x80 | (character & 0x3f));
    }
}

/* Bytes as byte-level BPE without a merge: token n is byte n. */
static json_t *byte_tokenizer(void) {
    json_t *vocab = json_object();
    for (int byte = 0; byte < 256; byte++) {
        char text[3];
        spell_byte(byte, text);
        json_object_set_new(vocab, text, json_integer(byte));
    }
    return json_pack("{s:s, s:n, s:n, s:[], s:n, s:{s:s, s:b, s:b, s:b}, s:n, s:{s:s, s:b, s:b, "
                     "s:b}, s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:[]}}",
                     "version", "1.0", "truncation", "padding", "added_tokens", "normalizer",
                     "pre_tokenizer", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0,
                     "use_regex", 0, "post_processor", "decoder", "type", "ByteLevel",
                     "add_prefix_space", 0, "trim_offsets", 0, "use_regex", 0, "model", "type",
                     "BPE", "dropout", "unk_token", "continuing_subword_prefix",
                     "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges", 0,
                     "vocab", vocab, "merges");
}

/* Of tokenizer_config.json: what forward takes, and where padding stands for generate. */
static json_t *own_settings(int64_t context) {
    return json_pack("{s:[s, s], s:s, s:I}", "model_input_names", "input_ids", "attention_mask",
                     "padding_side", "left", "model_max_length", (json_int_t)context);
}

/* The file as it stands, and behind its settings those that it lacks. transformers writes integers
   of any length into it. */
static bool add_settings(const char *path, const char *folder, int64_t context, fault *f) {
    size_t bytes;
    const char *key;
    json_t *value, *had = NULL, *more = own_settings(context);
    char *text = files_read(path, FILE_LIMIT, &bytes, f), *added = NULL, *whole = NULL;
    if (text)
        had = json_file_parse(path, text, bytes, &json_of_tokens,
                              JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, f);
    bool ok = had && (json_is_object(had) || fault_set(f, "%s: must be a JSON object", path));
    json_object_foreach(had, key, value) json_object_del(more, key);
    if (ok && json_object_size(more)) {
        size_t end = (size_t)(strrchr(text, '}') - text);
        added = json_dumps(more, JSON_INDENT(2));
        whole = added ? malloc(end + strlen(added) + 2) : NULL;
        ok = whole || fault_set(f, "%s: out of memory", path);
        if (ok)
            bytes = (size_t)sprintf(whole, "%.*s%s%s", (int)end, text,
                                    json_object_size(had) ? "," : "", added + 1);
    }
    ok = ok && write_file(folder, "tokenizer_config.json", whole ? whole : text, bytes, f);
    free(whole);
    free(added);
    free(text);
    json_decref(more);
    json_decref(had);
    return ok;
}

/* `settings` is given up here. */
static bool write_tokenizer_settings(const char *folder, json_t *settings, int64_t context,
                                     fault *f) {
    json_t *more = own_settings(context);
    if (settings && more) json_object_update_missing(settings, more);
    json_decref(more);
    return write_json(folder, "tokenizer_config.json", settings, f);
}

static bool write_byte_tokenizer(const char *folder, int64_t context, fault *f) {
    json_t *settings = json_pack("{s:s, s:b}", "tokenizer_class", "PreTrainedTokenizerFast",
                                 "clean_up_tokenization_spaces", 0);
    return write_tokenizer_settings(folder, settings, context, f) &&
           write_json(folder, "tokenizer.json", byte_tokenizer(), f);
}

static bool copy_file(const char *from_folder, const char *folder, const char *name, fault *f) {
    char path[PATH_ROOM];
    size_t bytes;
    if (!files_join(path, sizeof path, from_folder, name, f)) return false;
    char *text = files_read(path, FILE_LIMIT, &bytes, f);
    bool ok = text && write_file(folder, name, text, bytes, f);
    free(text);
    return ok;
}

static bool write_bpe_tokenizer(const char *from, const char *folder, int64_t context, fault *f) {
    static const char end[] = "<|endoftext|>";
    char path[PATH_ROOM];
    if (!files_join(path, sizeof path, from, "tokenizer.json", f)) return false;
    bool one_file = files_exist(path);
    if (!files_join(path, sizeof path, from, "tokenizer_config.json", f)) return false;
    if (one_file && !copy_file(from, folder, "tokenizer.json", f)) return false;
    if (one_file && files_exist(path)) return add_settings(path, folder, context, f);
    json_t *settings = one_file
                           ? json_pack("{s:s}", "tokenizer_class", "PreTrainedTokenizerFast")
                           : json_pack("{s:s, s:s, s:s, s:s}", "tokenizer_class", "GPT2Tokenizer",
                                       "bos_token", end, "eos_token", end, "unk_token", end);
    return write_tokenizer_settings(folder, settings, context, f) &&
           (one_file ||
            (copy_file(from, folder, "vocab.json", f) && copy_file(from, folder, "merges.txt", f)));
}

static bool write_tokenizer(const config *c, const char *folder, const listener *notes, fault *f) {
    const char *from = c->data.tokenizer_path;
    if (c->data.tokenizer == CONFIG_BYTE) return write_byte_tokenizer(folder, c->train.seq_len, f);
    if (from[0]) return write_bpe_tokenizer(from, folder, c->train.seq_len, f);
    listener_say(notes, "no tokenizer: the checkpoint's data.tokenizer_path names no folder with "
                        "vocab.json and merges.txt (--tokenizer-path)");
    return true;
}

/* ---- The folder ---------------------------------------------------------------------------- */

/* What ends a text, where the tokenizer has a token for it: bytes have none. */
static json_t *generation_json(const tokenizer *t) {
    json_t *root = json_pack("{s:b}", "use_cache", 1);
    if (!tokenizer_is_byte(t))
        json_object_set_new(root, "eos_token_id", json_integer(tokenizer_separator(t)));
    return root;
}

static bool has_file(const char *folder, const char *name) {
    char path[PATH_ROOM];
    fault unused;
    return files_join(path, sizeof path, folder, name, &unused) && files_exist(path);
}

/* Whether what lies in the folder came from here. One that was not finished has no config.json. */
static bool is_export(const char *folder) {
    fault unused;
    if (!has_file(folder, "config.json")) return has_file(folder, "modeling_nsa.py");
    json_t *root = import_json(folder, "config.json", &json_of_settings, &unused);
    const char *type = json_string_value(json_object_get(root, "model_type"));
    bool ours = type && !strcmp(type, "nsa_decoder");
    json_decref(root);
    return ours;
}

enum kind { MODEL, TOKENIZER, OTHER, CODE };

/* What an export has or had, in the order in which it goes: first its name as a model, which comes
   last: a folder without it is none that opens. */
static const struct {
    const char *name;
    enum kind kind;
} files[] = {
    {"model.safetensors.index.json", OTHER},
    {"pytorch_model.bin", OTHER},
    {"pytorch_model.bin.index.json", OTHER},
    {"adapter_config.json", OTHER},
    {"tokenizer.model", OTHER},
    {"spiece.model", OTHER},
    {"special_tokens_map.json", OTHER},
    {"added_tokens.json", OTHER},
    {"chat_template.jinja", OTHER},
    {"config.json", MODEL},
    {"model.safetensors", MODEL}, /* others may have it by another name */
    {"tokenizer.json", TOKENIZER},
    {"tokenizer_config.json", TOKENIZER},
    {"vocab.json", TOKENIZER},
    {"merges.txt", TOKENIZER},
    {"generation_config.json", CODE},
    {"modeling_nsa.py", CODE},
};

enum { FILES = sizeof files / sizeof *files };

/* Another model's files stay, and so does what transformers would read beside ours: a fault. */
static bool check_folder(const char *folder, const char *tokenizer_from, fault *f) {
    bool again = is_export(folder), source = files_same(folder, tokenizer_from);
    for (size_t i = 0; i < FILES; i++) {
        enum kind kind = files[i].kind;
        if (kind == CODE || (source && kind == TOKENIZER) || !has_file(folder, files[i].name))
            continue;
        if (!again || kind == OTHER)
            return fault_set(f, "%s/%s: not of an export; FOLDER must be new, or an older export",
                             folder, files[i].name);
    }
    return true;
}

/* Takes away what an older export left, and puts what is whole in its place. */
static bool put_in_place(const char *made, const char *folder, bool source, fault *f) {
    char from[PATH_ROOM], to[PATH_ROOM];
    for (size_t i = 0; i < FILES; i++) {
        if (files[i].kind == CODE || (source && files[i].kind == TOKENIZER)) continue;
        if (!files_join(to, sizeof to, folder, files[i].name, f)) return false;
        if (remove(to) && errno != ENOENT) return fault_errno(f, "%s: cannot be removed", to);
    }
    for (size_t i = FILES; i-- > 0;) {
        if (!has_file(made, files[i].name)) continue;
        if (!files_join(from, sizeof from, made, files[i].name, f) ||
            !files_join(to, sizeof to, folder, files[i].name, f))
            return false;
        if (rename(from, to)) return fault_errno(f, "%s: cannot be put in place", to);
    }
    return files_sync_folder(folder, f);
}

/* Takes the object. */
static bool write_parts(const checkpoint *k, const char *folder, int64_t vocab, json_t *generation,
                        const listener *notes, int *code, fault *f) {
    return write_json(folder, "generation_config.json", generation, f) &&
           write_file(folder, "modeling_nsa.py", modeling_nsa, modeling_nsa_bytes, f) &&
           write_tokenizer(&k->config, folder, notes, f) && write_model(k, folder, code, f) &&
           write_json(folder, "config.json", model_json(&k->config, vocab), f);
}

/* In a folder of their own first, so that an older export is there until the new one is whole. */
bool export_folder(const checkpoint *k, const char *folder, const listener *notes, int *code,
                   fault *f) {
    const config *c = &k->config;
    char made[PATH_ROOM];
    int held = -1;
    *code = 2;
    if (!checkpoint_verify(k, f)) return false;
    tokenizer *t = tokenizer_open(c->data.tokenizer, c->data.tokenizer_path, f);
    if (!t) return false;
    bool same = restore_same_vocabulary(k, t, c->data.tokenizer_path, f);
    json_t *generation = generation_json(t);
    int32_t tokens = tokenizer_vocab_size(t);
    int64_t vocab = c->model.vocab_size ? c->model.vocab_size : tokens;
    tokenizer_close(t);
    bool usable = same && check_weights(k, tokens, f) &&
                  check_folder(folder, c->data.tokenizer_path, f) &&
                  files_join(made, sizeof made, folder, ".export", f);
    if (usable) *code = 1;
    if (usable && files_make_folder(folder, f)) held = files_claim_folder(made, f);
    if (held < 0) {
        json_decref(generation);
        return false;
    }
    bool source = files_same(folder, c->data.tokenizer_path);
    bool ok = write_parts(k, made, vocab, generation, notes, code, f) &&
              put_in_place(made, folder, source, f);
    files_remove_claimed(made, held);
    return ok;
}
