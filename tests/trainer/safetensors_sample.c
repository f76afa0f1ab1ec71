/* safetensors_sample.c - writes a known file, or checks that one holds what Python was told to
   write: the C side of safetensors_python.py. Twin: that script. */
#include <stdio.h>
#include <string.h>

#include "checkpoint/safetensors.h"

int main(int argc, char **argv) {
    static float f[2][3] = {{1, 2, 3}, {-4, 5.5f, 1e-20f}};
    static double d[4] = {0.1, 0.2, -0.3, 1e300};
    static uint16_t h[2] = {0x3c00, 0xc000};
    static int64_t i[1] = {-7};
    safetensors_tensor list[] = {{"f32", SAFETENSORS_F32, 2, {2, 3}, f},
                                 {"f64", SAFETENSORS_F64, 1, {4}, d},
                                 {"f16", SAFETENSORS_F16, 1, {2}, h},
                                 {"i64", SAFETENSORS_I64, 1, {1}, i}};
    fault why = {.text = "usage: safetensors_sample write|check FILE"};
    uint64_t bytes, xxh64;
    bool ok = false;
    if (argc == 3 && !strcmp(argv[1], "write"))
        ok = safetensors_write(argv[2], list, 4, &bytes, &xxh64, &why);
    if (argc == 3 && !strcmp(argv[1], "check")) {
        static float f2[2][3];
        static double d2[4];
        static uint16_t h2[2];
        static int64_t i2[1];
        safetensors_tensor back[] = {list[0], list[1], list[2], list[3]};
        back[0].data = f2;
        back[1].data = d2;
        back[2].data = h2;
        back[3].data = i2;
        safetensors_file *file = safetensors_open(argv[2], &why);
        ok = file && safetensors_load(file, back, 4, &why);
        safetensors_close(file);
        if (ok && (memcmp(f, f2, sizeof f) || memcmp(d, d2, sizeof d) || memcmp(h, h2, sizeof h) ||
                   memcmp(i, i2, sizeof i)))
            ok = fault_set(&why, "%s: other values", argv[2]);
    }
    if (!ok) printf("%s\n", why.text);
    return !ok;
}
