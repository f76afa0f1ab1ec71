/* text.c - see text.h. */
#include "base/text.h"

#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

size_t text_character(const char *text, size_t left) {
    const unsigned char *s = (const unsigned char *)text;
    if (!left) return 0;
    size_t n = s[0] < 0x80   ? 1
               : s[0] < 0xc2 ? 0
               : s[0] < 0xe0 ? 2
               : s[0] < 0xf0 ? 3
               : s[0] < 0xf5 ? 4
                             : 0;
    unsigned low = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
    unsigned high = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
    if (n > left) return 0;
    if (n > 1 && (s[1] < low || s[1] > high)) return 0;
    for (size_t i = 2; i < n; i++)
        if (s[i] < 0x80 || s[i] > 0xbf) return 0;
    return n;
}

static bool is_printable(const unsigned char *s, size_t bytes) {
    if (bytes == 1) return s[0] >= 32 && s[0] != 127;
    if (bytes == 2) return s[0] != 0xc2 || s[1] >= 0xa0; /* U+0080 .. U+009F */
    if (bytes != 3 || s[0] != 0xe2) return bytes != 0;
    bool turns = s[1] == 0x80 && (s[2] == 0x8e || s[2] == 0x8f || (s[2] >= 0xa8 && s[2] <= 0xae));
    bool isolates = s[1] == 0x81 && s[2] >= 0xa6 && s[2] <= 0xa9;
    return !turns && !isolates;
}

void text_keep_printable(char *text) {
    size_t left = strlen(text), n;
    for (; left; text += n, left -= n) {
        n = text_character(text, left);
        bool keep = is_printable((unsigned char *)text, n);
        if (!n) n = 1;
        if (!keep) memset(text, '?', n);
    }
}

void text_print_line(FILE *out, const char *format, ...) {
    char line[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    text_keep_printable(line);
    fprintf(out, "%s\n", line);
}
