/* fuzz_checkpoint.c - a checkpoint's state.json and GPT-2's vocabulary files, as JSON that anybody
   may have written. Twin: examples/trainer/checkpoint/checkpoint.c, config.c, bpe_load.c. Not here:
   the tensors (fuzz_safetensors.c).

   The first byte says which. A state is wrapped with a checksum that fits, so that what lies behind
   the checksum is reached. */
#include "files.h"

#include <jansson.h>
#include <xxhash.h>

#include "checkpoint/checkpoint.h"
#include "data/tokenizer.h"

/* {"content": text, "xxh64": its checksum}, or NULL where the text is no JSON. */
static char *with_checksum(const char *text, size_t bytes) {
    char hex[24];
    json_t *content = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);
    char *canonical =
        content ? json_dumps(content, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17))
                : NULL;
    if (!canonical) {
        json_decref(content);
        return NULL;
    }
    snprintf(hex, sizeof hex, "%016llx",
             (unsigned long long)XXH64(canonical, strlen(canonical), 0));
    json_t *root = json_pack("{s:o, s:s}", "content", content, "xxh64", hex);
    char *wrapped = json_dumps(root, JSON_REAL_PRECISION(17));
    json_decref(root);
    free(canonical);
    return wrapped;
}

static void try_state(const char *text, size_t bytes, int wrap) {
    fault why;
    checkpoint k;
    char *wrapped = wrap ? with_checksum(text, bytes) : NULL;
    if (wrap && !wrapped) return;
    fuzz_write("state.json", wrapped ? wrapped : text, wrapped ? strlen(wrapped) : bytes);
    free(wrapped);
    if (!checkpoint_open(&k, fuzz_folder, &why)) {
        FUZZ_ASSERT(why.text[0] && !strpbrk(why.text, "\n\033"), "message: %s", why.text);
        return;
    }
    FUZZ_ASSERT(k.state.step >= 0 && k.state.data.used >= 0, "a negative count");
    FUZZ_ASSERT(k.config.model.n_heads >= 1 && k.config.nsa.d >= 1, "a setting below its least");
    float value;
    safetensors_tensor tensor = {"a", SAFETENSORS_F32, 1, {1}, &value};
    checkpoint_part part = {"model", &tensor, 1};
    (void)checkpoint_load(&k, &part, &why);
    json_t *again = config_to_json(&k.config);
    config copy = k.config;
    FUZZ_ASSERT(again && config_from_json(&copy, again, &why), "settings written and read: %s",
                why.text);
    FUZZ_ASSERT(config_same_model(&copy, &k.config, &why), "%s", why.text);
    json_decref(again);
    checkpoint_close(&k);
}

/* The part up to the first zero byte is merges.txt; behind it are entries for vocab.json, which
   gets the bytes' own and the end of text besides. */
static void try_vocabulary(const char *text, size_t bytes) {
    static const char words[] = "the cat\nsat on\t\xc3\xa9 \xff mats";
    fault why;
    size_t merges = 0, room = 256 * 24 + bytes + 64, n = 0;
    while (merges < bytes && text[merges]) merges++;
    char *vocab = malloc(room);
    vocab[n++] = '{';
    for (int b = 0, other = 256; b < 256; b++) {
        int plain = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        n += (size_t)snprintf(vocab + n, room - n, "\"\\u%04x\":%d,", plain ? b : other++, b);
    }
    n += (size_t)snprintf(vocab + n, room - n, "\"<|endoftext|>\":256");
    if (merges + 1 < bytes) {
        vocab[n++] = ',';
        memcpy(vocab + n, text + merges + 1, bytes - merges - 1);
        n += bytes - merges - 1;
    }
    vocab[n++] = '}';
    fuzz_write("vocab.json", vocab, n);
    fuzz_write("merges.txt", text, merges);
    free(vocab);
    tokenizer *t = tokenizer_open(CONFIG_GPT2, fuzz_folder, &why);
    if (!t) return;
    token_list list = {NULL, 0, 0};
    FUZZ_ASSERT(tokenizer_encode(t, words, sizeof words - 1, &list, &why), "%s", why.text);
    size_t at = 0;
    for (size_t i = 0; i < list.count; i++) {
        size_t count;
        const char *piece = tokenizer_bytes(t, list.ids[i], &count);
        FUZZ_ASSERT(at + count < sizeof words && !memcmp(words + at, piece, count),
                    "token %zu does not spell the text", i);
        at += count;
    }
    FUZZ_ASSERT(at == sizeof words - 1, "%zu bytes come back", at);
    token_list_free(&list);
    tokenizer_close(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    if (!size || size > 1 << 16) return -1;
    const char *text = (const char *)input + 1;
    fuzz_path("model.safetensors");
    if (input[0] % 4 == 3)
        try_vocabulary(text, size - 1);
    else
        try_state(text, size - 1, input[0] % 4 != 0);
    return 0;
}
