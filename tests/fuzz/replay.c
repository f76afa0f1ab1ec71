/* replay.c - runs a harness over kept inputs, with any compiler. Twin: fuzz.h. Not a fuzzer: it
   makes no inputs up.

   replay FILE... gives inputs to the harness. A file that ends in .hex holds an input a line, two
   hex digits a byte. Any other file is one input, such as a fuzzer leaves behind. A .hex file
   without lines is a failure: a corpus that went missing is not a corpus that passes. */
#include "fuzz.h"

#include <string.h>

/* The bytes of a file, NULL if it cannot be read. */
static char *read_whole(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) return perror(path), NULL;
    long end = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
    rewind(file);
    char *text = end < 0 ? NULL : malloc((size_t)end + 1);
    *size = text ? fread(text, 1, (size_t)end, file) : 0;
    fclose(file);
    if (text && *size == (size_t)end) return text;
    fprintf(stderr, "%s: cannot be read\n", path);
    free(text);
    return NULL;
}

/* The value of a hex digit, -1 if it is none. */
static int digit_value(char c) {
    static const char digits[] = "0123456789abcdef";
    const char *found = memchr(digits, c, 16);
    return found ? (int)(found - digits) : -1;
}

/* Turns the digits of a line into bytes, in their place: how many, -1 if they are no pairs. */
static long read_digits(char *line, size_t digits) {
    for (size_t i = 0; i < digits / 2; i++) {
        int high = digit_value(line[2 * i]), low = digit_value(line[2 * i + 1]);
        if (high < 0 || low < 0) return -1;
        line[i] = (char)(high * 16 + low);
    }
    return digits % 2 ? -1 : (long)(digits / 2);
}

/* One input, in memory of exactly its size, so that a sanitizer sees reads beyond it. */
static int replay_input(const char *bytes, size_t size) {
    uint8_t *data = malloc(size ? size : 1);
    if (!data) return 0;
    memcpy(data, bytes, size);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 1;
}

/* The number of inputs replayed, -1 if one could not be read. */
static int replay_lines(const char *path, char *text, size_t size) {
    int inputs = 0;
    for (size_t begin = 0, next; begin < size; begin = next, inputs++) {
        char *end = memchr(text + begin, '\n', size - begin);
        next = end ? (size_t)(end - text) + 1 : size;
        long bytes = read_digits(text + begin, next - begin - (end != NULL));
        if (bytes < 0) return fprintf(stderr, "%s: line %d is no bytes\n", path, inputs + 1), -1;
        if (!replay_input(text + begin, (size_t)bytes)) return -1;
    }
    return inputs;
}

static int replay(const char *path) {
    size_t size, length = strlen(path);
    char *text = read_whole(path, &size);
    int lines = length > 4 && !strcmp(path + length - 4, ".hex");
    int inputs = !text   ? -1
                 : lines ? replay_lines(path, text, size)
                         : (replay_input(text, size) ? 1 : -1);
    free(text);
    return inputs;
}

int main(int argc, char **argv) {
    int failures = argc < 2;
    for (int i = 1; i < argc; i++) {
        int inputs = replay(argv[i]);
        printf("%s: %d inputs\n", argv[i], inputs);
        failures += inputs <= 0;
    }
    return failures;
}
