/* fuzz_safetensors.c - files that claim to be safetensors. Twin:
   examples/trainer/checkpoint/safetensors.c. Not here: checkpoints around them (fuzz_checkpoint.c).

   The first byte says whether the rest is a file as it is, or a header and data to which the length
   is added. What is opened must be loadable, hold the file's own bytes, and survive being written
   and read again. */
#include "files.h"

#include "checkpoint/safetensors.h"

enum { MOST_TENSORS = 64, MOST_BYTES = 1 << 16 };

static safetensors_tensor list[MOST_TENSORS];

static void free_list(size_t count) {
    for (size_t i = 0; i < count; i++) free(list[i].data);
}

/* All tensors of a file, as a model that expects just these. */
static int load(safetensors_file *file, size_t *count) {
    fault why;
    size_t bytes = 0;
    *count = safetensors_count(file);
    if (*count > MOST_TENSORS) return 0;
    for (size_t i = 0; i < *count; i++) {
        list[i] = safetensors_info(file, i);
        bytes += safetensors_tensor_bytes(&list[i]);
        FUZZ_ASSERT(bytes <= MOST_BYTES, "more bytes than the file has");
        list[i].data = malloc(safetensors_tensor_bytes(&list[i]) + 1);
    }
    FUZZ_ASSERT(safetensors_load(file, list, *count, &why), "%s", why.text);
    return 1;
}

static void write_and_compare(size_t count) {
    fault why;
    uint64_t bytes, hash;
    const char *path = fuzz_path("again.safetensors");
    FUZZ_ASSERT(safetensors_write(path, list, count, &bytes, &hash, &why), "%s", why.text);
    safetensors_file *again = safetensors_open(path, &why);
    FUZZ_ASSERT(again, "%s", why.text);
    for (size_t i = 0; i < count; i++) {
        safetensors_tensor copy = list[i];
        size_t size = safetensors_tensor_bytes(&copy);
        copy.data = malloc(size + 1);
        /* One of many is refused: a file has to hold what is expected and nothing else. */
        FUZZ_ASSERT(safetensors_load(again, &copy, 1, &why) == (count == 1), "one of %zu", count);
        free(copy.data);
    }
    FUZZ_ASSERT(safetensors_count(again) == count, "%zu tensors", safetensors_count(again));
    safetensors_close(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t file_bytes[MOST_BYTES + 16];
    fault why;
    size_t at = 0, count;
    if (!size || size > MOST_BYTES) return -1;
    if (data[0] & 1) {
        /* The header ends where its braces close; quotes are passed over roughly. */
        size_t header = 0;
        for (int depth = 0; header < size - 1; header++) {
            depth += (data[1 + header] == '{') - (data[1 + header] == '}');
            if (!depth && header) break;
        }
        header += header < size - 1;
        for (; at < 8; at++) file_bytes[at] = (uint8_t)(header >> (8 * at));
    }
    memcpy(file_bytes + at, data + 1, size - 1);
    const char *path = fuzz_write("file.safetensors", file_bytes, at + size - 1);
    safetensors_file *file = safetensors_open(path, &why);
    if (!file) {
        FUZZ_ASSERT(strstr(why.text, "file.safetensors"), "a message without the file: %s",
                    why.text);
        FUZZ_ASSERT(!strpbrk(why.text, "\n\033"), "control bytes in a message");
        return 0;
    }
    if (load(file, &count)) {
        write_and_compare(count);
        free_list(count);
    }
    safetensors_close(file);
    return 0;
}
