/* bpe_pattern.c - whether a pattern that splits text means the same here as where it comes from.
   Twin: bpe_vocab.h. It compiles nothing.

   The package tokenizers reads patterns with Oniguruma, this program with PCRE2. What the two read
   alike is a list: all else is refused, for a split that is a little different is a model that is a
   little wrong. Elsewhere \h is a hexadecimal digit, (?m) lets a dot be a newline, \w takes marks,
   && intersects sets, and {,2} is a count. */
#include <string.h>

#include "data/bpe_vocab.h"

static const char escapes[] = "sSdDrntfAzZ", groups[] = ":=!>";

/* Behind a backslash: its bytes, or 0 where it is none of those that are read alike. */
static size_t escape_bytes(const char *at) {
    const char *close = strchr(at, '}');
    bool braced = at[0] && at[1] == '{' && close;
    if ((at[0] == 'p' || at[0] == 'P' || at[0] == 'x') && braced) return (size_t)(close - at) + 1;
    bool letter = (at[0] >= 'a' && at[0] <= 'z') || (at[0] >= 'A' && at[0] <= 'Z');
    bool digit = at[0] >= '0' && at[0] <= '9';
    if (!at[0] || digit || (letter && !strchr(escapes, at[0]))) return 0;
    return 1;
}

/* Behind "(": what opens a group, or -1. */
static int group_bytes(const char *at) {
    if (at[0] == '*') return -1;
    if (at[0] != '?') return 0;
    if (at[1] && strchr(groups, at[1])) return 2;
    if (at[1] == '<' && (at[2] == '=' || at[2] == '!')) return 3;
    size_t flags = strspn(at + 1, "i-");
    char end = at[1 + flags];
    return flags && (end == ':' || end == ')') ? (int)flags + 1 : -1;
}

/* From behind "[" to behind its "]"; NULL: what is in it is not read alike. */
static const char *set_end(const char *at) {
    at += *at == '^';
    if (*at == ']') return NULL; /* the first of a set, or its end */
    while (*at && *at != ']') {
        size_t escaped = *at == '\\' ? escape_bytes(at + 1) : 0;
        if (*at == '[' || !strncmp(at, "&&", 2) || (*at == '\\' && !escaped)) return NULL;
        at += 1 + escaped;
    }
    return *at ? at + 1 : NULL;
}

bool bpe_pattern_is_known(const char *pattern, const char **where) {
    for (const char *at = pattern; *at;) {
        size_t escaped = *at == '\\' ? escape_bytes(at + 1) : 0;
        int group = *at == '(' ? group_bytes(at + 1) : 0;
        const char *end = *at == '[' ? set_end(at + 1) : at + 1 + escaped + (group > 0 ? group : 0);
        bool known = end && group >= 0 && (*at != '\\' || escaped) && strncmp(at, "{,", 2);
        *where = at;
        if (!known) return false;
        at = end;
    }
    return true;
}
