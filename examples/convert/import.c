/* import.c - tensors and tokenizer; see import.h. What config.json says is import_settings.c's. */
#include "import.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json_file.h"
#include "data/tokenizer.h"
#include "model/model.h"
#include "train/train.h"

enum { PATH_ROOM = CONFIG_PATH_BYTES + 256, NAME_ROOM = 2 * PARAM_NAME_BYTES };

json_t *import_json(const char *folder, const char *name, const json_limit *limit, fault *f) {
    char path[PATH_ROOM];
    if (!files_join(path, sizeof path, folder, name, f)) return NULL;
    json_t *root = json_file_read(path, limit, f);
    if (root && !json_is_object(root)) fault_set(f, "%s: must be a JSON object", path);
    if (root && json_is_object(root)) return root;
    json_decref(root);
    return NULL;
}

static bool has_file(const char *folder, const char *name) {
    char path[PATH_ROOM];
    fault unused;
    return files_join(path, sizeof path, folder, name, &unused) && files_exist(path);
}

/* ---- Names --------------------------------------------------------------------------------- */

/* What a tensor is called elsewhere, by Llama's names and by nsa-vibe's; of a layer behind
   "blocks.N." here and "model.layers.N." or "blocks.N." there. NULL: as here. */
static const struct {
    const char *here, *llama, *vibe;
} names[] = {
    {"embed.weight", "model.embed_tokens.weight", NULL},
    {"norm.weight", "model.norm.weight", "norm_f.weight"},
    {"lm_head.weight", "lm_head.weight", NULL},
    {"norm1.weight", "input_layernorm.weight", NULL},
    {"norm2.weight", "post_attention_layernorm.weight", NULL},
    {"attn.W_Q.weight", "self_attn.q_proj.weight", NULL},
    {"attn.W_K.weight", "self_attn.k_proj.weight", NULL},
    {"attn.W_V.weight", "self_attn.v_proj.weight", NULL},
    {"attn.q_norm.weight", "self_attn.q_norm.weight", NULL},
    {"attn.k_norm.weight", "self_attn.k_norm.weight", NULL},
    {"attn.W_K_slc.weight", NULL, "attn.W_K_sel.weight"},
    {"attn.W_V_slc.weight", NULL, "attn.W_V_sel.weight"},
    {"attn.gate.weight", "self_attn.g_proj.weight", NULL},
    {"attn.out.weight", "self_attn.o_proj.weight", NULL},
    {"mlp.gate.weight", "mlp.gate_proj.weight", NULL},
    {"mlp.fc1.weight", "mlp.up_proj.weight", NULL},
    {"mlp.fc2.weight", "mlp.down_proj.weight", NULL},
};

/* Whether `theirs` is what somebody calls the tensor `here`. */
static bool same_tensor(const char *here, int layer, const char *theirs) {
    char text[NAME_ROOM];
    const char *tail = here;
    for (int skip = 0; layer >= 0 && skip < 2; skip++) tail = strchr(tail, '.') + 1;
    if (!strcmp(theirs, here)) return true;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i].here, tail)) continue;
        if (names[i].vibe && layer >= 0)
            snprintf(text, sizeof text, "blocks.%d.%s", layer, names[i].vibe);
        else
            snprintf(text, sizeof text, "%s", names[i].vibe ? names[i].vibe : here);
        if (!strcmp(theirs, text)) return true;
        if (!names[i].llama) return false;
        if (layer >= 0)
            snprintf(text, sizeof text, "model.layers.%d.%s", layer, names[i].llama);
        else
            snprintf(text, sizeof text, "%s", names[i].llama);
        return !strcmp(theirs, text);
    }
    return false;
}

/* ---- Tensors ------------------------------------------------------------------------------- */

static const char head_name[] = "lm_head.weight";

typedef struct importer {
    const params *table;
    safetensors_tensor *tensors; /* of the table, f32; behind them the head where it is tied */
    bool *found, tied;
    json_t *listed; /* tensors that an index names and no file has had; NULL: there is none */
} importer;

static int find(const importer *x, const char *name) {
    for (int i = 0; i < x->table->length; i++)
        if (same_tensor(x->table->list[i].name, x->table->list[i].layer, name)) return i;
    return x->tied && !strcmp(name, head_name) ? x->table->length : -1;
}

/* Buffers that RoPE is made of, which some files carry. */
static bool is_ignored(const char *name) {
    const char *end = strrchr(name, '.');
    return end && !strcmp(end, ".inv_freq");
}

static bool same_shape(const safetensors_tensor *a, const safetensors_tensor *b) {
    bool same = a->dims == b->dims;
    for (int i = 0; same && i < a->dims; i++) same = a->shape[i] == b->shape[i];
    return same;
}

static bool take(importer *x, const char *path, const safetensors_tensor *t, fault *f) {
    int place = find(x, t->name);
    size_t count = safetensors_tensor_bytes(t);
    json_object_del(x->listed, t->name);
    if (place < 0) {
        if (is_ignored(t->name)) return true;
        return fault_set(f, "%s: tensor %.100s: the model has none of this name", path, t->name);
    }
    const safetensors_tensor *to = &x->tensors[place];
    if (x->found[place]) return fault_set(f, "%s: tensor %.100s: there twice", path, t->name);
    if (!same_shape(t, to))
        return fault_set(f, "%s: tensor %.100s: its shape is not that of the model's %s", path,
                         t->name, to->name);
    x->found[place] = true;
    float *out = to->data;
    const uint16_t *half = t->data;
    switch (t->dtype) {
    case SAFETENSORS_F32:
        memcpy(out, t->data, count);
        break;
    case SAFETENSORS_BF16:
        for (size_t i = 0; i < count / 2; i++) out[i] = nsa_bf16_to_f32(half[i]);
        break;
    case SAFETENSORS_F16:
        for (size_t i = 0; i < count / 2; i++) out[i] = nsa_f16_to_f32(half[i]);
        break;
    case SAFETENSORS_F64:
        for (size_t i = 0; i < count / 8; i++) out[i] = (float)((const double *)t->data)[i];
        break;
    default:
        return fault_set(f, "%s: tensor %.100s: must be F64, F32, BF16 or F16", path, t->name);
    }
    safetensors_tensor taken = *to;
    taken.name = t->name; /* as the file has it; what f64 holds may only be too large */
    return safetensors_check_finite(path, &taken, 1, f);
}

/* Each tensor's own, aligned for any of the dtypes. */
static size_t room_of(const safetensors_tensor *t) {
    return (safetensors_tensor_bytes(t) + 7) / 8 * 8;
}

static bool read_file(importer *x, const char *path, fault *f) {
    safetensors_file *file = safetensors_open(path, f);
    if (!file) return false;
    size_t count = safetensors_count(file), bytes = 0;
    safetensors_tensor *list = calloc(count + 1, sizeof *list);
    for (size_t i = 0; list && i < count; i++) {
        list[i] = safetensors_info(file, i);
        bytes += room_of(&list[i]);
    }
    char *block = malloc(bytes + 1);
    bool ok = (list && block) || fault_set(f, "%s: out of memory for %zu bytes", path, bytes);
    for (size_t i = 0, at = 0; ok && i < count; i++) {
        list[i].data = block + at;
        at += room_of(&list[i]);
    }
    ok = ok && safetensors_load(file, list, count, f);
    for (size_t i = 0; ok && i < count; i++) ok = take(x, path, &list[i], f);
    free(block);
    free(list);
    safetensors_close(file);
    return ok;
}

/* What an index names and no file has: files are missing, or of another model. */
static bool all_listed(const importer *x, const char *index_name, fault *f) {
    const char *tensor = json_object_iter_key(json_object_iter(x->listed));
    return !tensor || fault_set(f, "%s: tensor %.100s: no file has it", index_name, tensor);
}

/* One file as it is, as transformers does; else every file that the index names, once: those of one
   file follow one another or do not. */
static bool read_files(importer *x, const char *folder, fault *f) {
    static const char index_name[] = "model.safetensors.index.json";
    char path[PATH_ROOM];
    const char *tensor, *name;
    json_t *value;
    if (has_file(folder, "adapter_config.json"))
        return fault_set(f,
                         "%s/adapter_config.json: of PEFT, whose adapter transformers would add to "
                         "the weights; must be merged (merge_and_unload) and saved, or not be here",
                         folder);
    if (!has_file(folder, "model.safetensors") && !has_file(folder, index_name))
        return fault_set(f,
                         "%s: has neither model.safetensors nor its index: must be a folder that "
                         "transformers saved (no GGUF, no .bin)",
                         folder);
    if (has_file(folder, "model.safetensors"))
        return files_join(path, sizeof path, folder, "model.safetensors", f) &&
               read_file(x, path, f);
    json_t *root = import_json(folder, index_name, &json_of_tensors, f), *done = json_object();
    json_t *map = json_object_get(root, "weight_map");
    bool ok = root && (json_is_object(map) ||
                       fault_set(f, "%s: weight_map: must be an object", index_name));
    x->listed = json_copy(map);
    if (ok && !x->listed) ok = fault_set(f, "%s: out of memory", index_name);
    json_object_foreach(map, tensor, value) {
        name = json_string_value(value);
        if (!ok || (name && json_object_get(done, name))) continue;
        if (!name || !files_plain_name(name))
            ok = fault_set(f, "%s: %.100s: must name a file of the folder", index_name, tensor);
        else
            ok = files_join(path, sizeof path, folder, name, f) && read_file(x, path, f) &&
                 !json_object_set_new(done, name, json_true());
    }
    ok = ok && all_listed(x, index_name, f);
    json_decref(x->listed);
    json_decref(done);
    json_decref(root);
    return ok;
}

static bool all_found(const importer *x, const char *folder, fault *f) {
    for (int i = 0; i < x->table->length; i++)
        if (!x->found[i])
            return fault_set(f, "%s: no tensor for the model's %s", folder, x->tensors[i].name);
    return true;
}

/* A head that is tied may stand in the files as well. Of another one versions of transformers make
   different models. */
static bool check_head(const importer *x, fault *f) {
    const safetensors_tensor *head = &x->tensors[x->table->length];
    const safetensors_tensor *embed = &x->tensors[find(x, "embed.weight")];
    if (!x->found[x->table->length] || !x->tied ||
        !memcmp(head->data, embed->data, safetensors_tensor_bytes(head)))
        return true;
    return fault_set(f,
                     "%s: differs from the embedding; must be the same, or absent, where "
                     "tie_word_embeddings is true",
                     head_name);
}

/* The tokenizer goes by no path: a run's own is found beside its checkpoints (checkpoint_open). */
static bool write_checkpoint(const config *given, const importer *x, const char *out_dir,
                             fault *f) {
    static config own;
    const config *c = &own;
    own = *given;
    char place[PATH_ROOM];
    if (!files_join(place, sizeof place, out_dir, "tokenizer", f)) return false;
    if (!strcmp(own.data.tokenizer_path, place)) own.data.tokenizer_path[0] = 0;
    checkpoint_state state = {.seed = (uint64_t)c->train.seed, .loss_scale = 1};
    checkpoint_part part = {"model", x->tensors, (size_t)x->table->length};
    state.data.split_parts = state.data.split_size = -1;
    int held = files_make_folder(out_dir, f) ? files_lock(out_dir, FILES_CLAIM, f) : -1;
    if (held < 0) return false;
    bool ok = !checkpoint_exists(out_dir) ||
              fault_set(f, "%s: another call has made a checkpoint meanwhile", out_dir);
    ok = ok && checkpoint_write(out_dir, c, &state, &part, 1, 0, f);
    close(held);
    return ok;
}

bool import_model(const config *c, const char *folder, const char *out_dir, int *code, fault *f) {
    model m;
    ops o = {0};
    *code = 2;
    tokenizer *t = tokenizer_open(c->data.tokenizer, c->data.tokenizer_path, f);
    if (!t) return false;
    model_config shape = train_model_config(c, tokenizer_vocab_size(t));
    tokenizer_close(t);
    if (!ops_cpu_open(&o, 1, f)) return false;
    if (!model_describe(&m, &shape, &o, f)) {
        ops_cpu_close(&o);
        return false;
    }
    size_t length = (size_t)m.params.length, elements = (size_t)m.params.elements;
    importer x = {&m.params, calloc(length + 1, sizeof *x.tensors),
                  calloc(length + 1, sizeof *x.found), c->model.tied_embeddings, NULL};
    const param *embed = &m.params.list[find(&x, "embed.weight")];
    size_t more = x.tied ? (size_t)(embed->shape[0] * embed->shape[1]) : 0;
    float *values = malloc((elements + more) * sizeof *values);
    bool ok = (x.tensors && x.found && values) || fault_set(f, "out of memory for the model");
    for (size_t i = 0; ok && i < length + x.tied; i++) {
        const param *p = i < length ? &m.params.list[i] : embed;
        x.tensors[i] = (safetensors_tensor){p->name, SAFETENSORS_F32, p->dims, {0}, NULL};
        x.tensors[i].data = i < length ? values + p->offset : values + elements;
        memcpy(x.tensors[i].shape, p->shape, sizeof p->shape);
    }
    ok = ok && read_files(&x, folder, f) && all_found(&x, folder, f) && check_head(&x, f);
    if (ok) *code = 1;
    ok = ok && write_checkpoint(c, &x, out_dir, f);
    free(values);
    free(x.found);
    free(x.tensors);
    model_close(&m);
    ops_cpu_close(&o);
    return ok;
}

/* ---- The tokenizer ------------------------------------------------------------------------- */

static bool copy_file(const char *from, const char *to, const char *name, int *code, fault *f) {
    char path[PATH_ROOM], target[PATH_ROOM];
    size_t bytes;
    if (!files_join(path, sizeof path, from, name, f) ||
        !files_join(target, sizeof target, to, name, f))
        return false;
    char *text = files_read(path, json_of_tokens.bytes, &bytes, f);
    bool ok = text && files_replace(target, text, bytes, f);
    if (!text) *code = 2;
    free(text);
    return ok;
}

/* An export's own, bytes in the spelling of byte-level vocabularies and nothing else. */
static bool is_byte_tokenizer(const char *folder) {
    fault unused;
    json_t *root = import_json(folder, "tokenizer.json", &json_of_tokens, &unused);
    const json_t *bpe_of = json_object_get(root, "model"), *id;
    const json_t *vocab = json_object_get(bpe_of, "vocab");
    const char *token;
    bool bytes = json_object_size(vocab) == 256 &&
                 !json_array_size(json_object_get(bpe_of, "merges")) &&
                 !json_array_size(json_object_get(root, "added_tokens"));
    json_object_foreach((json_t *)vocab, token, id) {
        bytes = bytes && json_is_integer(id) && tokenizer_spells(token, json_integer_value(id));
    }
    json_decref(root);
    return bytes;
}

/* Vocabularies of other kinds, which the trainers do not read. */
static bool check_others(const char *folder, fault *f) {
    static const struct {
        const char *name, *kind;
    } others[] = {{"tokenizer.model", "SentencePiece or tiktoken"},
                  {"spiece.model", "SentencePiece"},
                  {"sentencepiece.bpe.model", "SentencePiece"},
                  {"vocab.txt", "WordPiece"},
                  {"tokenizer_config.json", "settings of a tokenizer that is not there"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (has_file(folder, others[i].name))
            return fault_set(f,
                             "%s/%s: %s; must be a tokenizer.json of byte-level BPE, or vocab.json "
                             "and merges.txt (--tokenizer byte takes the weights alone)",
                             folder, others[i].name, others[i].kind);
    return true;
}

/* None: bytes where the embedding has as many rows, else numbers that no text becomes. */
static bool without_tokenizer(config *c, const char *folder, const listener *notes, fault *f) {
    bool bytes = !c->model.vocab_size || c->model.vocab_size == 256;
    if (!check_others(folder, f)) return false;
    listener_say(notes, "%s: no tokenizer.json, no merges.txt: tokens are %s", folder,
                 bytes ? "bytes" : "numbers, and text needs --tokenizer-path");
    return bytes || config_put(c, "data.tokenizer", "gpt2", f);
}

bool import_tokenizer(config *c, const char *folder, const char *out_dir, const listener *notes,
                      int *code, fault *f) {
    static const char *const wanted[] = {"tokenizer.json", "tokenizer_config.json", "vocab.json",
                                         "merges.txt"};
    char to[PATH_ROOM];
    fault unused;
    *code = 2;
    if (config_from(c, "data.tokenizer") == CONFIG_FROM_COMMAND_LINE ||
        config_from(c, "data.tokenizer_path") == CONFIG_FROM_COMMAND_LINE)
        return true;
    bool whole = has_file(folder, "tokenizer.json");
    if (whole && is_byte_tokenizer(folder)) return true;
    if (!whole && !(has_file(folder, "merges.txt") && has_file(folder, "vocab.json")))
        return without_tokenizer(c, folder, notes, f);
    tokenizer *readable = tokenizer_open(CONFIG_GPT2, folder, f); /* before anything is written */
    if (!readable) return false;
    tokenizer_close(readable);
    *code = 1;
    if (!files_join(to, sizeof to, out_dir, "tokenizer", f) || !files_make_folder(out_dir, f))
        return false;
    if (mkdir(to, 0777)) return fault_errno(f, "%s: cannot make the folder", to);
    bool ok =
        config_put(c, "data.tokenizer", "gpt2", f) && config_put(c, "data.tokenizer_path", to, f);
    for (size_t i = 0; ok && i < sizeof wanted / sizeof *wanted; i++)
        ok = !has_file(folder, wanted[i]) || copy_file(folder, to, wanted[i], code, f);
    if (!ok) files_remove_folder(to, &unused);
    return ok;
}
