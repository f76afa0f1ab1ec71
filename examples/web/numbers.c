/* numbers.c - what the page computes, computed natively: a line for each geometry, layer, head and
   some tokens, with the bits of all numbers folded into one. Twin: numbers.js, which prints the
   same lines of web.wasm. numbers MODEL TEXT ISA. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "web.h"

enum { TOKEN_STEP = 7, LONGEST_FILE = 1 << 26 };

static const int GEOMETRIES[][3] = {{6, 32, 16}, {4, 8, 32}, {64, 512, 16}, {3, 100, 64}};

/* FNV-1a over words of 32 bits. */
static uint32_t fold(uint32_t hash, const void *from, size_t words) {
    for (size_t i = 0; i < words; i++) {
        uint32_t word;
        memcpy(&word, (const char *)from + 4 * i, sizeof word);
        hash = (hash ^ word) * 16777619u;
    }
    return hash;
}

/* Of numbers that C's library had a part in, as f32: libraries differ in a double's last bit. */
static uint32_t fold_rounded(uint32_t hash, const double *from, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float rounded = (float)from[i];
        hash = fold(hash, &rounded, 1);
    }
    return hash;
}

static uint32_t hash_of(int layer, int head, int token, int slc_count) {
    int kv_head = head / (web_size(WEB_HEADS) / web_size(WEB_KV_HEADS));
    size_t numbers = 0;
    for (int i = 0; i < WEB_PARTS; i++) numbers += (size_t)web_part(i);
    uint32_t hash = fold_rounded(2166136261u, web_look(layer, head, token), numbers);
    hash = fold(hash, web_reads(layer, kv_head, token), 3);
    hash = fold(hash, web_blocks(layer, kv_head, token), (size_t)slc_count);
    return fold(hash, web_next(token), (size_t)web_size(WEB_VOCAB));
}

static void print_all(const int *geometry, int bytes) {
    double bits = web_bits();
    printf("n %d w %d l' %d: %08x\n", geometry[0], geometry[1], geometry[2],
           (unsigned)fold_rounded(2166136261u, &bits, 1));
    for (int layer = 0; layer < web_size(WEB_LAYERS); layer++)
        for (int head = 0; head < web_size(WEB_HEADS); head++)
            for (int token = bytes - 1; token >= 0; token -= TOKEN_STEP)
                printf("layer %d head %d token %d: %08x\n", layer, head, token,
                       (unsigned)hash_of(layer, head, token, geometry[0]));
}

static uint8_t *read_file(const char *path, int *bytes) {
    FILE *file = fopen(path, "rb");
    uint8_t *data = file ? malloc(LONGEST_FILE) : NULL;
    if (data) *bytes = (int)fread(data, 1, LONGEST_FILE, file);
    if (file) fclose(file);
    if (!data) fprintf(stderr, "numbers: %s cannot be read\n", path);
    return data;
}

int main(int argc, char **argv) {
    int model_bytes, bytes;
    uint8_t *model = argc == 4 ? read_file(argv[1], &model_bytes) : NULL;
    uint8_t *text = model ? read_file(argv[2], &bytes) : NULL;
    if (!text) return 2;
    int ok = web_open(model, model_bytes);
    if (ok && bytes > web_size(WEB_CONTEXT)) bytes = web_size(WEB_CONTEXT);
    for (size_t i = 0; ok && i < sizeof GEOMETRIES / sizeof *GEOMETRIES; i++) {
        const int *g = GEOMETRIES[i];
        ok = web_read(text, bytes, g[0], g[1], g[2], atoi(argv[3]));
        if (ok) print_all(g, bytes);
    }
    if (!ok) fprintf(stderr, "numbers: %s\n", web_fault());
    free(model);
    free(text);
    return !ok;
}
